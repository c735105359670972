"""A step of split learning with one client: dure, and others, side by side.

Batches of 64, SGD, two processes on one machine with a thread each (`split_peers/cut_models.py`):

    mlp    784-200 | 200-10: 51 KB at the cut
    cnn    the CNN of FedAvg's paper for 28 x 28, cut behind its first block: 1.6 MB at the cut

    undivided      the whole model in one process
    transfers      what crosses the cut, there and back, over TCP; nothing is computed
    raw socket     head and tail by hand: sendmsg and recv_into
    grpc           head and tail by hand: a unary call a step; where grpcio is installed
    torch RPC      dist_autograd and its DistributedOptimizer
    machines       dure's client and server, whose frames go over TCP
    dure           `dure serve` and `dure join`
    dure with TLS  the same with certificates of `dure certificates`

Contenders take turns, another one first in each round; figures are medians over the rounds, ratios
medians of the rounds' ratios. A turn of dure's starts both commands anew; its figure is the median
of its rounds after the first, of so many steps each, as history.jsonl has them: so a turn's begin
and end, and what is written down then, are in it.

    python benchmarks/split.py --result benchmarks/results/split.json

Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from outcome import give, takes_result

sys.path.insert(0, str(Path(__file__).parent / "server_peers"))
sys.path.insert(0, str(Path(__file__).parent / "split_peers"))

from cut_models import BATCH, CUT, STEPS
from ends import End
from rounds import median_ratio, quartiles, turns

JSON = dict[str, Any]
PEERS = Path(__file__).parent / "split_peers"
BY_HAND = ["undivided", "transfers", "raw socket", "grpc", "torch RPC", "machines"]
GOALS = {"mlp": 1.8, "cnn": 1.15}
"""Times (undivided and transfers), that dure may take."""
TLS_GOAL = 1.3
"""Times dure without TLS."""
DURE_ROUNDS = 5
PATIENCE = 300.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
DURE = [sys.executable, "-m", "dure"]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Pair:
    """A contender whose client is told how many steps to make."""

    def __init__(self, way: str, model: str, stack: ExitStack) -> None:
        script = str(PEERS / "steps.py")
        self.client = End(script, way, model, "client")
        stack.callback(self.client.end)
        if way == "undivided":
            self.client.hear()
            return
        server = End(script, way, model, "server")
        stack.callback(server.end)
        says = server.hear()
        answer = self.client.hear()
        self.client.say(says)
        server.say(answer)

    def milliseconds(self, steps: int) -> float:
        self.client.say(steps)
        return 1e3 * float(self.client.hear())


# dure, as people start it


def certificates(folder: Path) -> Path:
    """An authority, and a server's certificate for this machine."""
    for words in (["init"], ["server", "127.0.0.1"]):
        command = [*DURE, "certificates", *words, "--folder", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    return folder


@contextmanager
def running(command: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended at the end."""
    with output.open("wb") as words:
        process = subprocess.Popen(command, stdout=words, stderr=words, env=ENVIRONMENT)
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def address(output: Path, server: subprocess.Popen[bytes]) -> str:
    """Where a server says that it serves."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        for line in output.read_text().splitlines():
            if line.startswith("serving at "):
                return line.split()[2]
        time.sleep(0.05)
    raise RuntimeError(f"dure serve does not serve: {output.read_text()}")


def by_dure(model: str, rounds: int, tls: Path | None) -> float:
    """Milliseconds of a step. tls: the folder of certificates."""
    task = f"{PEERS / 'cut_models.py'}:{model}"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        serve = [*DURE, "serve", task, "split", "--cut", CUT, "--clients", "1"]
        serve += ["--batch-size", str(BATCH), "--rounds", str(rounds), "--access", "open"]
        serve += ["--port", "0", "--out", str(folder / "run")]
        join = ["--state", str(folder / "state")]
        if tls is not None:
            serve += ["--certificate", str(tls / "server.pem")]
            join += ["--authority", str(tls / "authority.pem")]
        words = folder / "server.txt"
        server = stack.enter_context(running(serve, words))
        command = [*DURE, "join", address(words, server), task, *join]
        stack.enter_context(running(command, folder / "client.txt"))
        try:
            status = server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            said = words.read_text() + (folder / "client.txt").read_text()
            raise RuntimeError(f"dure serve ended with {status}: {said}")
        lines = (folder / "run" / "history.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    at = [one["seconds"] for one in records if one["kind"] == "step"]
    return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(at)) / STEPS[model]


# All of a model


def measure(model: str, ways: Sequence[str], rounds: int, dure_rounds: int, tls: Path) -> JSON:
    """Milliseconds of a step of each contender."""
    contenders: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for way in ways:
            if way == "dure":
                contenders[way] = lambda: by_dure(model, dure_rounds, None)
            elif way == "dure with TLS":
                contenders[way] = lambda: by_dure(model, dure_rounds, tls)
            else:
                pair = Pair(way, model, stack)
                pair.milliseconds(STEPS[model])
                contenders[way] = lambda pair=pair: pair.milliseconds(STEPS[model])  # type: ignore[misc]
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in turns(list(ways), number):
                samples[way].append(contenders[way]())
                show(f"{model} {way:14} {samples[way][-1]:8.3f} ms")
    found: JSON = {way: quartiles(one) for way, one in samples.items()}
    if {"undivided", "transfers"} <= samples.keys():
        least = [a + b for a, b in zip(samples["undivided"], samples["transfers"], strict=True)]
        for way in ways:
            found[way]["of undivided and transfers"] = median_ratio(samples[way], least)
    if {"dure", "dure with TLS"} <= samples.keys():
        ratio = median_ratio(samples["dure with TLS"], samples["dure"])
        found["dure with TLS"]["of dure"] = ratio
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*BY_HAND, "dure", "dure with TLS"]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--models", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--ways", nargs="*", default=every, choices=every)
    takes_result(parser)
    asked = parser.parse_args()
    ways = list(asked.ways)
    skipped = {}
    if "grpc" in ways and importlib.util.find_spec("grpc") is None:
        skipped["grpc"] = "grpcio is not installed"
        ways.remove("grpc")
    rounds = 1 if asked.quick else asked.rounds
    result: JSON = {
        "compared": "milliseconds of a step of split learning, one client, batches of 64",
        "rounds": rounds,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "skipped": skipped,
        "goals": {
            "dure, of undivided and transfers": GOALS,
            "dure with TLS, of dure": TLS_GOAL,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        tls = certificates(Path(folder) / "certificates")
        for model in asked.models:
            few = 2 if asked.quick else DURE_ROUNDS
            result[f"{model}, ms a step"] = measure(model, ways, rounds, few, tls)
    give(result, asked.result)


if __name__ == "__main__":
    main()
