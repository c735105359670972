"""Call paths: the modules and functions of dure that one step, or one round, passes.

    step     data parallel by ring all-reduce on two processes, rank 0, its main thread
    round    FedAvg with ten clients, all of them asked, in the simulation, by the engine `batched`
    network  FedAvg with one client, over a network: all threads of the server, and the client's

Calls of functions that are defined in dure are counted, after a few steps, in `Learner.advance` and
all that it calls: no evaluation, no checkpoint. Lambdas and comprehensions count as calls too.

    python benchmarks/way_of_a_step.py [--list] --result benchmarks/results/way_of_a_step.json
    python benchmarks/way_of_a_step.py --figure docs/images/ways.svg > /dev/null

--list prints every file with its functions, in the order in which they are first called. --figure
draws the call paths of docs/architecture.md. The result goes to standard output as JSON.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from figures import Panel, save
from outcome import give, takes_result

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.world import RankContext, World
from dure.run.registry import encode

SOURCE = Path(dure.__file__).parent
WARM = 4
"""Steps before the one that is counted."""

QUIET = 1.0
"""Seconds in which a client hears what became of the round before, and waits for the next."""


def walked(strategy: Strategy, world: World) -> list[tuple[str, str]]:
    """(file, function) of every call, in order, in one step of `strategy`.

    Of a world that serves, also those in its other threads and in its client, which is one too.
    """
    if world.serves:
        return _served(strategy, world)
    task = dure.load_task("digits")

    def program(context: RankContext) -> list[tuple[str, str]]:
        learner = strategy.learner(task, context, 0)
        for _ in range(WARM):
            learner.advance(0)
        calls: list[tuple[str, str]] = []

        def saw(frame: FrameType, event: str, argument: Any) -> None:
            file = Path(frame.f_code.co_filename)
            if event == "call" and file.is_relative_to(SOURCE):
                calls.append((str(file.relative_to(SOURCE)), frame.f_code.co_name))

        sys.setprofile(saw)
        try:
            learner.advance(0)
        finally:
            sys.setprofile(None)
        return calls

    return world.run(program, lambda event: None)


def _served(strategy: Strategy, world: World) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    stop = threading.Event()
    clients: list[threading.Thread] = []
    seen: list[bool] = []
    """Not empty while calls are noted."""

    def saw(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and seen:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(SOURCE):
                calls.append((str(file.relative_to(SOURCE)), frame.f_code.co_name))

    def client(url: str) -> None:
        with suppress(Exception):  # it is stopped
            dure.join(url, dure.load_task("digits"), name="client", stop=stop)

    def report(event: dict[str, Any]) -> None:
        if "serving" in event:
            clients.append(threading.Thread(target=client, args=(event["serving"],)))
            clients[0].start()

    def program(context: RankContext) -> None:
        # What its client is told of the run.
        context.config = {"run": "0" * 16, "strategy": encode(strategy)}
        with context.ending:
            learner = strategy.learner(dure.load_task("digits"), context, 0)
            for _ in range(WARM):
                learner.advance(0)
            time.sleep(QUIET)
            sys.setprofile(saw)
            seen.append(True)
            learner.advance(0)
            seen.clear()
            sys.setprofile(None)

    threading.setprofile(saw)  # of threads that begin from now on
    try:
        world.run(program, report)
    finally:
        threading.setprofile(None)
        stop.set()
        clients[0].join()
    return calls


def summary(calls: list[tuple[str, str]]) -> dict[str, int]:
    return {
        "files": len({file for file, _ in calls}),
        "functions": len(set(calls)),
        "calls": len(calls),
    }


def show(name: str, calls: list[tuple[str, str]], listed: bool) -> None:
    counts = Counter(calls)
    print(name, summary(calls), file=sys.stderr)
    for file in dict.fromkeys(file for file, _ in calls) if listed else ():
        functions = [
            f"{function} {counts[place, function]}"
            for place, function in dict.fromkeys(calls)
            if place == file
        ]
        print(f"  {file}: {', '.join(functions)}", file=sys.stderr)


# The figure.

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
CALL_PATHS = (
    "The call path of a batch",
    "The call path of an update",
    "The call path over a network",
)
TITLE = "Three call paths"
ROW = re.compile(r"^\| \d+ \| `([\w/]+)/(\w+\.py)` \| `(\w+)` \|", re.MULTILINE)
WIDTH = 400
BOX = 30
GAP = 14


def drawn(heading: str) -> Panel:
    """Draw the steps of a call path, one below the other; each package has a colour."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    parts = [f'<text x="10" y="14" class="title">{heading}</text>']
    colours: dict[str, int] = {}
    y = 26
    for number, (folder, file, function) in enumerate(ROW.findall(section)):
        colour = colours.setdefault(folder.partition("/")[0], len(colours))
        if number:
            arrow = f"M{WIDTH // 2} {y - GAP}v{GAP - 4}m-4 -4l4 4l4 -4"
            parts.append(f'<path d="{arrow}" class="s{colour}" fill="none"/>')
        parts.append(
            f'<rect x="10" y="{y}" width="{WIDTH - 20}" height="{BOX}" rx="5" class="f{colour}" '
            f'fill-opacity="0.16"/>'
        )
        parts.append(
            f'<text x="22" y="{y + 19}"><tspan class="soft">{number + 1}&#160; {folder}/</tspan>'
            f'{file}<tspan class="soft">&#160; {function}</tspan></text>'
        )
        y += BOX + GAP
    return Panel("\n".join(parts), WIDTH, y)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="every file and its functions")
    parser.add_argument("--figure", type=Path, help="where to draw the call paths, as SVG")
    takes_result(parser)
    asked = parser.parse_args()
    if asked.figure is not None:
        save(asked.figure, TITLE, list(map(drawn, CALL_PATHS)))
    ways = {
        "step": walked(dure.DataParallel(all_reduce="ring"), dure.Processes(2)),
        "round": walked(dure.FedAvg(clients=10), dure.Simulated(engine="batched")),
        "network": walked(dure.FedAvg(clients=1), dure.Network(port=0, access="open")),
    }
    for name, calls in ways.items():
        show(name, calls, asked.list)
    give({name: summary(calls) for name, calls in ways.items()}, asked.result, indent=1)


if __name__ == "__main__":
    main()
