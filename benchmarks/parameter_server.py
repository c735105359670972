"""The parameter server of dure and others: what a push and a pull take, and what training keeps.

1. One push and one pull, of 4 KB and of 40 MB, on one host: a gradient goes to a server, and the
   weights come back. Contenders take turns, and another one begins each round.

       raw shared memory     one copy each way, and a byte over a unix socket to say so
       raw TCP, unix socket  the bytes there and back; the server adds nothing up
       sum itself            what a server of plain SGD computes, without any exchange
       dure                  worker, server and their ports, as in a run; with the sum
       torch RPC             rpc_sync of a function that adds and returns; with the sum
       Ray                   a method of an actor, likewise, where ray is installed

2. The same between two hosts (network namespaces), where root may make them: raw TCP and dure.
3. Training with two workers that do not wait for each other, in steps a second of both together:
   the MLP of the built-in digits, and an MLP of 10 million parameters. No communication is the same
   loop without push and pull, each worker on a model of its own. Then dure's parameter server with
   one server, dure's Hogwild, torch RPC and Ray.

Every process computes with one thread. Figures are medians and quartiles over the rounds; ratios
are medians of the rounds' ratios. Without --quick it takes several minutes.

    python benchmarks/parameter_server.py --result benchmarks/results/parameter_server.json

Progress and a table go to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from outcome import give, takes_result

sys.path.insert(0, str(Path(__file__).parent / "server_peers"))

from ends import End
from exchanges import SERVERS, SIZES
from rounds import median_ratio, quartiles, turns

import dure
from trainers import BATCH, task_of
from two_hosts import ADDRESSES, NoHostsError, two_hosts

JSON = dict[str, Any]
TIMES = {"4 KB": 400, "40 MB": 6}
"""Exchanges of a turn."""
STEPS = {"digits": 1000, "10 M": 16}
"""Batches of a turn, of each worker."""
SKIPPED = {"ps-lite": "it is built from its source, which is not here"}


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# A push and a pull


class Pair:
    """A contender: its server, where it has one, and its worker. hosts: what commands begin with
    there, and the addresses."""

    def __init__(
        self,
        way: str,
        stack: ExitStack,
        hosts: Sequence[tuple[list[str], str]] = (([], "127.0.0.1"),) * 2,
    ) -> None:
        (there, address), (here, own) = hosts
        os.environ["OWN_ADDRESS"] = own
        self.worker = End("exchanges.py", way, "worker", prefix=here)
        stack.callback(self.worker.end)
        if way not in SERVERS:
            self.worker.hear()
            self.worker.say(None)
            return
        server = End("exchanges.py", way, "server", address, prefix=there)
        stack.callback(server.end)
        says = server.hear()
        answer = self.worker.hear()
        self.worker.say(says)
        server.say(answer)

    def milliseconds(self, size: str, times: int) -> float:
        self.worker.say([SIZES[size], times])
        return 1e3 * float(self.worker.hear())


def exchanges(pairs: dict[str, Pair], rounds: int) -> JSON:
    """Milliseconds of each contender, by size."""
    found: JSON = {}
    for size, times in TIMES.items():
        samples: dict[str, list[float]] = {way: [] for way in pairs}
        for number in range(rounds):
            for way in turns(list(pairs), number):
                samples[way].append(pairs[way].milliseconds(size, times))
        found[size] = {way: quartiles(one) for way, one in samples.items()}
        for way, one in found[size].items():
            show(f"  {size:6} {way:18} {one['median']:8.3f} ms")
    return found


def on_one_host(rounds: int) -> JSON:
    ways = ["raw shared memory", "raw TCP", "unix socket", "sum itself", "dure", "torch RPC"]
    if installed("ray"):
        ways.append("Ray")
    with ExitStack() as stack:
        pairs = {way: Pair(way, stack) for way in ways}
        found = exchanges(pairs, rounds)
    goal = found["40 MB"]
    limit = [
        1.5 * raw + one
        for raw, one in zip(
            goal["raw shared memory"]["samples"], goal["sum itself"]["samples"], strict=True
        )
    ]
    found["of 1.5 x raw shared memory and the sum, at 40 MB"] = median_ratio(
        goal["dure"]["samples"], limit
    )
    return found


def between_hosts(rounds: int) -> JSON:
    with ExitStack() as stack:
        try:
            begins = stack.enter_context(two_hosts())
        except NoHostsError as error:
            show(f"between hosts: {error}")
            return {"skipped": str(error)}
        hosts = list(zip(begins, ADDRESSES, strict=True))
        pairs = {way: Pair(way, stack, hosts) for way in ("raw TCP", "dure")}
        found = exchanges(pairs, rounds)
    for size in SIZES:
        row = found[size]
        row["of raw TCP"] = median_ratio(row["dure"]["samples"], row["raw TCP"]["samples"])
    return found


# Training


class Peers:
    """A contender of processes that are told how many steps to make."""

    def __init__(self, way: str, model: str, stack: ExitStack) -> None:
        ends = ["both"] if way == "Ray" else ["worker 0", "worker 1"]
        self.workers = [End("trainers.py", way, model, end) for end in ends]
        for worker in self.workers:
            stack.callback(worker.end)
        if way == "torch RPC":
            server = End("trainers.py", way, model, "server")
            stack.callback(server.end)
            where = server.hear()
            for worker in self.workers:
                worker.hear()
                worker.say(where)
        else:
            for worker in self.workers:
                worker.hear()

    def steps_per_second(self, steps: int) -> float:
        for worker in self.workers:
            worker.say(steps)
        return 2 * steps / max(float(worker.hear()) for worker in self.workers)


def by_dure(strategy: Callable[[int], dure.Strategy], model: str, steps: int) -> float:
    """Steps a second: of the second of two rounds."""
    world = dure.Processes(2) if strategy(1).name == "hogwild" else None
    run = dure.train(task_of(model), strategy(steps), world, dure.Stop(rounds=2))
    first, second = (step.seconds for step in run.history.steps[-2:])
    return 2 * steps / (second - first)


def server_of(steps: int) -> dure.Strategy:
    return dure.ParameterServer(1, 2, batch_size=BATCH, staleness=None, period=steps)


def hogwild_of(steps: int) -> dure.Strategy:
    return dure.Hogwild(batch_size=BATCH // 2, period=2 * steps)


def training(model: str, rounds: int, steps: int) -> JSON:
    """Steps a second of each contender."""
    peers = {"no communication": "alone", "torch RPC": "torch RPC"}
    if installed("ray"):
        peers["Ray"] = "Ray"
    with ExitStack() as stack:
        contenders: dict[str, Callable[[], float]] = {}
        for name, way in peers.items():
            one = Peers(way, model, stack)
            one.steps_per_second(3)
            # The slow ones would make each round long.
            few = steps if name == "no communication" else max(4, steps // 5)
            contenders[name] = lambda one=one, few=few: one.steps_per_second(few)  # type: ignore[misc]
        contenders["dure"] = lambda: by_dure(server_of, model, steps)
        contenders["Hogwild of dure"] = lambda: by_dure(hogwild_of, model, steps)
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds):
            for name in turns(list(contenders), number):
                samples[name].append(contenders[name]())
    apart = samples["no communication"]
    found: JSON = {}
    for name, one in samples.items():
        found[name] = {**quartiles(one), "of no communication": median_ratio(one, apart)}
        shown = found[name]
        show(f"  {name:18} {shown['median']:9.1f} steps/s {shown['of no communication']:6.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of few steps")
    parser.add_argument(
        "--only", nargs="*", default=["host", "hosts", "digits", "10 M"], help="some of the parts"
    )
    takes_result(parser)
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    skipped = dict(SKIPPED)
    if not installed("ray"):
        skipped["Ray"] = "it is not installed"
    result: JSON = {
        "compared": "one push and one pull, and asynchronous training with two workers",
        "rounds": rounds,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "skipped": skipped,
    }
    if "host" in asked.only:
        show("on one host")
        result["one host, ms"] = on_one_host(rounds)
    if "hosts" in asked.only:
        show("between hosts")
        result["two hosts, ms"] = between_hosts(rounds)
    for model in [name for name in STEPS if name in asked.only]:
        show(f"training, {model}")
        steps = max(10, STEPS[model] // 10) if asked.quick else STEPS[model]
        result[f"training, {model}, steps a second"] = training(model, rounds, steps)
    give(result, asked.result)


if __name__ == "__main__":
    main()
