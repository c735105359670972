"""What becomes of a run in which one process does what it should not: a matrix.

    world, engine    `faults/places.py` has them: one process, ranks of every kind, engines of a
                     simulation, a server with its clients
    place            the loss, the model's forward or backward, of every stage of a pipeline, the
                     data, a metric, the optimizer's step
    kind             raise, exit (`sys.exit(7)`), hang, stop (SIGSTOP), kill (SIGKILL)

A run is as it should be where it has ended within the deadline (and a margin, for a busy machine)
with an error of dure's own that names the rank or client that struck and the step or round, or has
gone on without it, where the system can; and where no process is left. Where one process is the
whole run nobody else could notice that it is gone or waits: there it is asked whether Ctrl-C ends
one that hangs, and whether one that was stopped goes on.

    python benchmarks/fault_matrix.py --into benchmarks/results/fault_matrix.json
    python benchmarks/fault_matrix.py --only "pipeline.*backward:1.*hang"

It prints the matrix, and each run as it ends to standard error; --into writes all of it as JSON,
and leaves what stands there of other runs. It
exits with 1 where a run was not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import torch
from faulty_task import IN_THIS_PROCESS, KINDS, Fault, struck
from places import WHERES, Case, Where

from dure.worlds.processes.fork_server import server as fork_server

JSON = dict[str, Any]
BEGIN = 90.0
"""Seconds until a fault has happened, or a run that never passes its place has ended."""
MARGIN = 15.0
"""Seconds over the deadline: what is given up after it still has to end, on a busy machine."""
AFTER = {"loss": 20, "forward": 20, "backward": 6, "data": 120, "metric": 1, "optimizer": 4}
"""Passes of a place that go well before, so that the run is in its midst: losses and models are
tried before, and measured."""


# One run, in a process of its own or in one that does many


class Runner:
    """A process that trains. It is forked, for a fresh one needs seconds to import torch."""

    def __init__(self, log: Path) -> None:
        mine, its = Pipe()
        self.connection = mine
        self.pid = os.fork()
        if self.pid == 0:
            mine.close()
            _live(its, log)
        its.close()

    def begin(self, name: str, case: Case) -> None:
        self.connection.send((name, case))

    def said(self, seconds: float) -> JSON | None:
        """What it says of its run; {} where it is gone, None where it is silent for so long."""
        if not self.connection.poll(seconds):
            return None
        try:
            found: JSON = self.connection.recv()
            return found
        except (EOFError, ConnectionResetError):
            return {}

    def end(self) -> None:
        """Ends it, and all that it has started: they are of its session."""
        for pid in _session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


def _live(connection: Connection, log: Path) -> None:
    try:
        os.setsid()
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        while True:
            name, case = connection.recv()
            IN_THIS_PROCESS.update(passes=0, struck=False, client=None)
            said = WHERES[name].way(case)
            connection.send({**said, "left": _left() if WHERES[name].lasting else []})
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _processes() -> Iterator[tuple[int, str, int, int]]:
    """(pid, state, parent, session) of all that there are."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                yield int(folder.name), fields[0], int(fields[1]), int(fields[3])


def _session(leader: int) -> list[int]:
    return [pid for pid, _, _, session in _processes() if session == leader]


def _left() -> list[int]:
    """Ranks that are left of a run: children of the fork server."""
    return [
        pid for pid, state, parent, _ in _processes() if parent == fork_server.pid and state != "Z"
    ]


# What became of it


@dataclass
class Found:
    """What became of a run. seconds: from the fault to the end. ok: None where there is nothing to
    be judged, for the place is not passed there, or the task was refused."""

    where: str
    place: str
    kind: str
    what: str
    seconds: float | None
    ok: bool | None


def tried(runner: Runner, name: str, case: Case) -> Found:
    """Runs a case, and judges it."""
    fault = case.fault
    marker = Path(fault.marker)
    runner.begin(name, case)
    until = time.monotonic() + BEGIN
    said = None
    while said is None and struck(marker) is None and time.monotonic() < until:
        said = runner.said(0.05)
    where = WHERES[name]
    by = struck(marker)
    # Nobody else is there who could notice that the process is gone, or waits.
    alone = by is not None and (by["pid"] == runner.pid or by["name"] == "server")
    if said is None and by is not None:
        if alone and fault.kind in ("hang", "stop"):
            said = _helped(runner, by["pid"], fault.kind)
        elif alone and fault.kind == "kill":
            said = {}
        else:
            said = runner.said(case.deadline * where.waits + MARGIN)
    seconds = round(time.time() - by["at"], 1) if by is not None else None
    what, ok = judged_alone(fault.kind, said) if alone else judged(where, fault.kind, by, said)
    return Found(name, fault.place, fault.kind, what, seconds, ok)


def _helped(runner: Runner, pid: int, kind: str) -> JSON | None:
    """What a user can do where one process is the whole run."""
    time.sleep(0.5)
    if kind == "stop":
        os.kill(pid, signal.SIGCONT)
        return runner.said(MARGIN)
    os.kill(pid, signal.SIGINT)
    # Another one within a second counts as the same.
    time.sleep(1.2)
    os.kill(pid, signal.SIGINT)
    return runner.said(MARGIN)


def judged_alone(kind: str, said: JSON | None) -> tuple[str, bool]:
    """What became of a run that is one process, in words, and whether it is as it should be."""
    said = said or {}
    if kind == "kill":
        return "gone, with nobody there to tell", not said
    if kind == "stop":
        return "goes on when it is let", "ended" in said
    if kind == "hang":
        return "ended by Ctrl-C", said.get("error") == "KeyboardInterrupt"
    text = " ".join(str(said.get("text", "")).split())
    return text or str(said), _names_a_step(text) and "failed in" in text


def judged(where: Where, kind: str, by: JSON | None, said: JSON | None) -> tuple[str, bool | None]:
    """What became of a run of several processes, in words, and whether it is as it should be."""
    if said is None:
        return "it goes on without end", False
    text = " ".join(str(said.get("text", "")).split())
    if by is None:
        if said.get("error") == "ValueError":
            return f"refused: {text}", None
        return ("not passed", None) if "ended" in said else (f"before the fault: {text}", False)
    if said.get("left"):
        return f"{len(said['left'])} processes are left", False
    if "ended" in said:
        told = [" ".join(one.split()) for one in said.get("clients", [])]
        # A client that is gone, or waits, says nothing itself.
        silent = "clients" in said and kind in ("raise", "exit") and not told
        return "; ".join(["went on", *told]), where.goes_on and not silent
    name = named(by, text)
    wrong = [] if name else ["nobody is named"]
    wrong += [] if _names_a_step(text) else ["no step is named"]
    wrong += [] if said.get("error", "").endswith("Error") and text else ["no error of dure's"]
    return "; ".join([*wrong, text or str(said)]), not wrong


def _names_a_step(text: str) -> bool:
    return re.search(r"\b(step|round|call) \d+|the first evaluation", text) is not None


def named(by: JSON, text: str) -> bool:
    """Whether an error names who struck, as far as that one knew itself."""
    if by["name"] is not None:
        return by["name"] in text
    if by["rank"] is not None:
        # Ranks of a parameter server have names of their own.
        return (
            re.search(rf"\branks? ([\d, ]*\b)?{by['rank']}\b|\b(worker|server) \d", text)
            is not None
        )
    if by["client"] is not None and "client" in text:
        return re.search(rf"\bclient {by['client']}\b", text) is not None
    return re.search(r"\b(client|rank|worker) \d|the server|server", text) is not None


# All of them


def cases(names: str | None, deadline: float, folder: Path) -> Iterator[tuple[str, Case]]:
    pattern = re.compile(names or "")
    for name, where in WHERES.items():
        for place in where.places:
            for number, kind in enumerate(KINDS):
                if not pattern.search(f"{name} {place} {kind}"):
                    continue
                own = folder / re.sub(r"\W+", "-", f"{name} {place} {kind}")
                own.mkdir(parents=True)
                fault = Fault(
                    place=place,
                    kind=kind,
                    after=AFTER[place.partition(":")[0]],
                    marker=str(own / "struck"),
                    # Rank 0 has more to do than the others: both are tried.
                    on=number % where.ranks if where.ranks and place != "metric" else None,
                )
                yield name, Case(fault, own, deadline)


def run(names: str | None, deadline: float, folder: Path) -> Iterator[Found]:
    """Tries all cases that are named, one after the other."""
    with Runners(folder / "output.txt") as runners:
        for name, case in cases(names, deadline, folder):
            where = WHERES[name]
            found = tried(runners.one_for(where), name, case)
            runners.used(keep=where.lasting and found.ok is not False)
            yield found


class Runners:
    """One runner at a time. It is kept for the next run where that is one of those that share a
    process, and so a fork server, as it was."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.runner: Runner | None = None

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def one_for(self, where: Where) -> Runner:
        if not where.lasting:
            self.end()
        if self.runner is None:
            self.runner = Runner(self.log)
        return self.runner

    def used(self, keep: bool) -> None:
        if not keep:
            self.end()

    def end(self) -> None:
        if self.runner is not None:
            self.runner.end()
            self.runner = None


def _tell(one: Found) -> None:
    mark = {True: "ok", False: "WRONG", None: "-"}[one.ok]
    took = "" if one.seconds is None else f" after {one.seconds} s"
    said = f"{mark:5} {one.where}: {one.place} {one.kind}{took}: {one.what[:400]}"
    print(said, file=sys.stderr, flush=True)


def table(found: list[Found]) -> str:
    """A row for each place of a world, a column for each kind."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in found:
        rows.setdefault((one.where, one.place), {})[one.kind] = _cell(one)
    lines = [f"| where | place | {' | '.join(KINDS)} |", "| --- " * (2 + len(KINDS)) + "|"]
    for (where, place), cells in rows.items():
        lines.append(f"| {where} | {place} | {' | '.join(cells.get(k, '') for k in KINDS)} |")
    return "\n".join(lines)


def _cell(one: Found) -> str:
    if one.ok is None:
        return one.what.partition(":")[0]
    if not one.ok:
        return f"WRONG: {one.what[:60]}"
    if one.what in ("gone, with nobody there to tell", "goes on when it is let", "ended by Ctrl-C"):
        return one.what.partition(",")[0]
    return f"{'went on' if one.what.startswith('went on') else 'named'}, {one.seconds} s"


def write(path: Path, deadline: float, found: list[Found]) -> None:
    """Writes what was found; what stands there of other runs stays."""
    before = json.loads(path.read_text())["runs"] if path.exists() else []
    now = [{**vars(one), "deadline": deadline} for one in found]
    runs = {(one["where"], one["place"], one["kind"]): one for one in [*before, *now]}
    # In the order of the matrix, whatever was tried last.
    order = list(WHERES)
    listed = sorted(runs.values(), key=lambda one: order.index(one["where"]))
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"runs": listed}, indent=1) + "\n")
    new.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="a pattern of 'world place kind'")
    parser.add_argument("--deadline", type=float, default=6.0, help="seconds")
    parser.add_argument("--into", type=Path, help="a file for the result, as JSON")
    asked = parser.parse_args()
    # So that no process is left of a run that is under way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for one in run(asked.only, asked.deadline, Path(folder)):
            _tell(one)
            found.append(one)
            if asked.into is not None:
                write(asked.into, asked.deadline, found)
    print(table(found))
    wrong = [one for one in found if one.ok is False]
    print(f"\n{len(found)} runs, {len(wrong)} not as they should be", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
