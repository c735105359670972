"""How fast FedAvg is simulated on one machine: dure, other frameworks, and loops written by hand.

Every contender is a program of its own in benchmarks/federated_peers. Its own interpreter runs it,
and it is started again for each measurement. All train the same federation from the same file: the
same clients with the same examples, the same initial weights, the same clients in every round, one
local epoch of SGD with rate 0.1 and batches of 10. Only the order of a client's examples within its
epoch may differ.

    rounds a second       after the first round, until the last is done
    until round 1 is done seconds from the start of the process: imports, data and whatever is
                          compiled or started
    peak memory           proportional set size (PSS), summed over the contender's process and all
                          its descendants: what they share is counted once. It is read ten times a
                          second in the first run, which is not timed, because reading takes time
    accuracy              on the test data after the last round. "agrees" says that it differs from
                          the median of all contenders by at most three standard errors and two
                          points, the latter for the order of examples: all have done the same work

    dure                  dure.train in its simulated world
    lean, lean x2         a loop by hand: one model, flat weights; in one process and in two
    naive                 the usual loop: a deep copy, a DataLoader and an optimizer for each client
    Flower                its simulation engine: Ray, one actor a core
    pfl, pfl x2           pfl-research's simulated backend on torch; in one process and in two
    FedJAX                its compiled trainer on JAX
    fluke, FedLab         their servers and trainers on torch, in one process

    python benchmarks/federated_peers/install.py PEERS
    python benchmarks/federated_simulation.py --data MNIST --peers PEERS \\
        --result benchmarks/results/federated_simulation.json

A contender that is not installed is reported as skipped, with the reason. Without --data (a folder
of MNIST's four files) there is no CNN. Figures are medians and quartiles of repetitions in which
all contenders take turns. Progress and tables go to standard error, the result as JSON to standard
output. --page FILE fills the tables of a page.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from federated_peers.federation import BATCH, LR
from outcome import give, takes_result
from pages import fill, table
from rounds import quartiles_of, turns
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.federated.server.sampling import uniform
from dure.machine.cores import available_cores
from dure.tasks.models import CNN, TwoNN

JSON = dict[str, Any]
PROGRAMS = Path(__file__).parent / "federated_peers"
SEED = 0


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# What is trained.


class Row(NamedTuple):
    """examples: gives a task, the indices of its training examples in the order of the clients, and
    how many each has. threads: of torch, over the processes of a contender; a small MLP is faster
    with one.
    """

    title: str
    clients: int
    cohort: int
    rounds: int
    model: Callable[[], nn.Module]
    examples: Callable[[Row, Path | None], tuple[dure.Task, Tensor, list[int]]]
    needs_data: bool = False
    threads: int = 1


def divided(row: Row, data: Path | None) -> tuple[dure.Task, Tensor, list[int]]:
    """The digits, divided evenly."""
    task = dure.load_task("digits")
    parts = dure.IID().divide(row.clients, task.train, SEED)
    return task, torch.cat(list(parts)), [len(part) for part in parts]


def drawn(row: Row, data: Path | None) -> tuple[dure.Task, Tensor, list[int]]:
    """Ten digits for each client, with replacement: there are fewer digits than clients."""
    task = dure.load_task("digits")
    generator = torch.Generator().manual_seed(SEED)
    indices = torch.randint(len(task.train), (10 * row.clients,), generator=generator)
    return task, indices, [10] * row.clients


def images(row: Row, data: Path | None) -> tuple[dure.Task, Tensor, list[int]]:
    """Sixty images of MNIST for each client."""
    task = dure.load_task("mnist", data=str(data))
    generator = torch.Generator().manual_seed(SEED)
    indices = torch.randperm(len(task.train), generator=generator)[: 60 * row.clients]
    return task, indices, [60] * row.clients


def mlp() -> nn.Module:
    return TwoNN(features=64)


ROWS = {
    "digits": Row("digits, MLP 64-200-200-10, 100 clients, 10 a round", 100, 10, 100, mlp, divided),
    "cnn": Row(
        "MNIST, CNN, 100 clients of 60 images, 10 a round",
        100,
        10,
        20,
        CNN,
        images,
        True,
        available_cores(),
    ),
    "1000": Row("1,000 clients of 10 digits, same MLP, 10 a round", 1_000, 10, 100, mlp, drawn),
    "10000": Row("10,000 clients of 10 digits, same MLP, 100 a round", 10_000, 100, 50, mlp, drawn),
}


def write_federation(row: Row, data: Path | None, file: Path) -> JSON:
    """Writes what the programs read, and returns what the result says of it."""
    task, indices, sizes = row.examples(row, data)
    inputs, targets = task.train.batch(indices)
    model = seeded_model(dataclasses.replace(task, model=row.model), SEED)
    weights = [parameter.detach().numpy() for parameter in model.parameters()]
    tested = slice(2_000)
    np.savez(
        file,
        inputs=inputs.numpy(),
        targets=targets.numpy(),
        test_inputs=task.test.inputs[tested].numpy(),
        test_targets=task.test.targets[tested].numpy(),
        starts=np.cumsum([0, *sizes]),
        cohorts=np.array(
            [
                uniform(SEED, number, row.clients, row.cohort / row.clients)
                for number in range(row.rounds)
            ]
        ),
        **{f"weight{position:02}": weight for position, weight in enumerate(weights)},
    )
    return {
        "title": row.title,
        "clients": row.clients,
        "clients_per_round": row.cohort,
        "examples_per_client": statistics.median(sizes),
        "rounds": row.rounds,
        "parameters": sum(weight.size for weight in weights),
        "test_examples": len(task.test.targets[tested]),
    }


# Who competes.


class Contender(NamedTuple):
    """program: a file of benchmarks/federated_peers. peer: whose environment it needs, None for
    this one."""

    program: str
    peer: str | None = None
    processes: int = 1


CONTENDERS = {
    "dure": Contender("with_dure.py"),
    "lean": Contender("lean.py"),
    "lean x2": Contender("lean.py", processes=2),
    "naive": Contender("naive.py"),
    "Flower": Contender("with_flower.py", "flower"),
    "pfl": Contender("with_pfl.py", "pfl"),
    "pfl x2": Contender("with_pfl.py", "pfl", processes=2),
    "FedJAX": Contender("with_fedjax.py", "fedjax"),
    "fluke": Contender("with_fluke.py", "fluke"),
    "FedLab": Contender("with_fedlab.py", "fedlab"),
}

NOT_INSTALLABLE = {
    "FLUTE": "it is no package (microsoft/msrflute has no setup.py), and its requirements name "
    "torch 1.13.1"
}


def interpreter(contender: Contender, peers: Path | None) -> Path:
    """Raises LookupError with the reason where there is none."""
    if contender.peer is None:
        return Path(sys.executable)
    if peers is None:
        raise LookupError(
            "no --peers DIR was given; benchmarks/federated_peers/install.py makes one"
        )
    python = peers.absolute() / contender.peer / "bin" / "python"
    if not python.exists():
        raise LookupError(f"there is no {contender.peer} in the folder of peers")
    return python


# One measurement.


def descendants() -> list[int]:
    """Processes that this one began, and those that they began; none is lost, see
    `adopt_orphans`."""
    found = [os.getpid()]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found[1:]


def adopt_orphans() -> None:
    """Descendants whose parents end become children of this process (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def proportional_set_size(process: int) -> int:
    """Bytes; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class PeakMemory(threading.Thread):
    """Of all descendants, until told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            self.peak = max(self.peak, sum(map(proportional_set_size, descendants())))


def end_all() -> None:
    """Ends what a program has left behind."""
    for process in descendants():
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def reported(line: str) -> JSON | None:
    """What a line says; None for what frameworks print."""
    with contextlib.suppress(json.JSONDecodeError):
        said = json.loads(line)
        if isinstance(said, dict) and ("round" in said or "accuracy" in said):
            return said
    return None


def environment(contender: Contender) -> dict[str, str]:
    """Other frameworks do not see this one's path; and everybody's modules are compiled once, as
    those of installed packages are."""
    left_out = {"PYTHONDONTWRITEBYTECODE"} | (
        {"PYTHONPATH"} if contender.peer is not None else set()
    )
    return {name: value for name, value in os.environ.items() if name not in left_out}


def measure(
    python: Path, contender: Contender, file: Path, threads: int, patience: float, memory: bool
) -> JSON:
    """Starts the program once, and measures its memory or its time. Raises RuntimeError if it
    fails."""
    command = [python, PROGRAMS / contender.program, file]
    command += [
        "--processes",
        str(contender.processes),
        "--threads",
        str(max(1, threads // contender.processes)),
    ]
    own = environment(contender)
    watch = PeakMemory()
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        with errors.open("w") as stream:
            if memory:
                watch.start()
            started = time.time()
            running = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stream, text=True, cwd=folder, env=own
            )
            try:
                output, _ = running.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"it was not done after {patience:.0f} s") from None
            finally:
                watch.ended.set()
                end_all()
        if running.returncode:
            lines = errors.read_text().strip().splitlines()
            telling = (
                [line.strip() for line in lines if re.match(r"\s*[\w.]*Error: ", line)]
                or lines
                or ["no word"]
            )
            raise RuntimeError(f"it ended with {running.returncode}: {telling[-1]}")
    said = [what for line in output.splitlines() if (what := reported(line)) is not None]
    if memory:
        return {"peak_memory": watch.peak}
    times = {what["round"]: what["time"] for what in said if "round" in what}
    last = max(times)
    return {
        "rounds_per_second": (last - 1) / (times[last] - times[1]),
        "seconds_to_first_round": times[1] - started,
        "accuracy": said[-1]["accuracy"],
        "versions": said[-1]["versions"],
    }


# What comes of it.


def contest(row: Row, about: JSON, file: Path, asked: argparse.Namespace) -> JSON:
    """All contenders on one federation, in turns. A contender that fails is begun anew, and is out
    when it has failed three times running."""
    pythons: dict[str, Path] = {}
    skipped = dict(NOT_INSTALLABLE)
    for name in asked.peers_only:
        try:
            pythons[name] = interpreter(CONTENDERS[name], asked.peers)
        except LookupError as error:
            skipped[name] = str(error)
    samples: dict[str, list[JSON]] = {name: [] for name in pythons}
    failures: dict[str, list[str]] = {}

    def taken(name: str, memory: bool, tries: int = 3) -> JSON:
        try:
            return measure(
                pythons[name], CONTENDERS[name], file, row.threads, asked.patience, memory
            )
        except RuntimeError as error:
            show(f"{name}: {error}")
            failures.setdefault(name, []).append(str(error))
            if tries == 1:
                raise
            return taken(name, memory, tries - 1)

    for number in range(asked.repeats + 1):
        for name in turns(list(pythons), number):
            if name in skipped:
                continue
            try:
                got = taken(name, number == 0)
            except RuntimeError as error:
                skipped[name] = str(error)
                continue
            samples[name].append(got)
            show(f"{number}/{asked.repeats} {line(name, got)}")
    measured = {name: summary(samples[name]) for name in samples if name not in skipped}
    judge(measured, about["test_examples"])
    return {**about, "contenders": measured, "skipped": skipped, "failures": failures}


def summary(samples: list[JSON]) -> JSON:
    """samples: the first has the memory, the others the times."""
    memory, *timed = samples
    numbers = ("rounds_per_second", "seconds_to_first_round", "accuracy")
    times = {name: quartiles_of(timed, name) for name in numbers}
    return {**times, **memory, "versions": timed[0]["versions"]}


def judge(measured: JSON, test_examples: int) -> None:
    """Adds to every contender whether its accuracy agrees with the others'."""
    if not measured:
        return
    middle = statistics.median(one["accuracy"]["median"] for one in measured.values())
    noise = 0.02 + 3 * (middle * (1 - middle) / test_examples) ** 0.5
    for one in measured.values():
        one["agrees"] = abs(one["accuracy"]["median"] - middle) <= noise


def line(name: str, one: JSON) -> str:
    """What there is of one contender."""
    formats = {
        "rounds_per_second": "{:8.2f} rounds/s",
        "seconds_to_first_round": "{:6.2f} s to the first",
        "accuracy": "accuracy {:.4f}",
        "peak_memory": "{:13,} bytes",
    }
    return "  ".join(
        [f"{name:<10}", *(text.format(one[key]) for key, text in formats.items() if key in one)]
    )


def medians(one: JSON) -> JSON:
    numbers = {
        key: value["median"]
        for key, value in one.items()
        if isinstance(value, dict) and "median" in value
    }
    return {**numbers, "peak_memory": one["peak_memory"]}


def report(result: JSON) -> None:
    for row in result["rows"]:
        show(f"\n{row['title']}")
        for name, one in row.get("contenders", {}).items():
            show(line(name, medians(one)) + ("" if one["agrees"] else "  differs from the others"))
        for name, reason in row["skipped"].items():
            show(f"{name:<16} skipped: {reason}")


def tables(result: JSON) -> dict[str, str]:
    """By the name of its marks: federated-simulation-digits, ..."""
    head = [
        "",
        "rounds a second",
        "against dure",
        "until round 1 is done",
        "peak memory",
        "accuracy",
    ]
    found = {}
    for row in result["rows"]:
        lines = []
        ours = row.get("contenders", {}).get("dure")
        for name, one in row.get("contenders", {}).items():
            middle = medians(one)
            rate = middle["rounds_per_second"]
            against = f"{rate / medians(ours)['rounds_per_second']:.2f}x" if ours else ""
            lines.append(
                [
                    name,
                    f"{rate:.1f}",
                    against,
                    f"{middle['seconds_to_first_round']:.1f} s",
                    f"{middle['peak_memory'] / 1e6:,.0f} MB",
                    f"{middle['accuracy']:.3f}",
                ]
            )
        lines += [
            [f"{name}: {reason}", *["–"] * (len(head) - 1)]
            for name, reason in row["skipped"].items()
        ]
        found[f"federated-simulation-{row['name']}"] = table(head, lines)
    return found


def results(asked: argparse.Namespace) -> JSON:
    adopt_orphans()
    about: JSON = {
        "benchmark": "federated_simulation",
        "cores": available_cores(),
        "torch": torch.__version__,
    }
    about |= {
        "python": platform.python_version(),
        "repeats": asked.repeats,
        "local_epochs": 1,
        "batch": BATCH,
        "lr": LR,
    }
    about |= {
        "memory": "sum of PSS over a process and its descendants, every 0.1 s, in a run that is "
        "not timed"
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.only:
            row = ROWS[name]
            row = row._replace(
                rounds=asked.rounds or row.rounds, threads=asked.threads or row.threads
            )
            if row.needs_data and asked.data is None:
                rows.append(
                    {
                        "name": name,
                        "title": row.title,
                        "skipped": {"all": "no --data: it trains on MNIST"},
                    }
                )
                continue
            show(row.title)
            file = Path(folder) / f"{name}.npz"
            rows.append(
                {"name": name, **contest(row, write_federation(row, asked.data, file), file, asked)}
            )
    return {**about, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a folder of MNIST's four files, for the CNN")
    parser.add_argument(
        "--peers", type=Path, help="the folder that federated_peers/install.py made"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(ROWS),
        default=list(ROWS),
        metavar="ROW",
        help=", ".join(ROWS),
    )
    parser.add_argument(
        "--peers-only",
        nargs="+",
        choices=list(CONTENDERS),
        default=list(CONTENDERS),
        metavar="NAME",
        help=", ".join(CONTENDERS),
    )
    parser.add_argument("--rounds", type=int, help="instead of each row's own; at least 2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--threads",
        type=int,
        help="of torch, over a contender's processes; instead of each row's own",
    )
    parser.add_argument(
        "--patience", type=float, default=900, help="seconds that one measurement may take"
    )
    parser.add_argument("--quick", action="store_true", help="4 rounds, once, for a first try")
    parser.add_argument("--page", type=Path, help="the page whose tables to fill")
    parser.add_argument(
        "--from", type=Path, dest="earlier", help="describe this result again, and measure nothing"
    )
    takes_result(parser)
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds = asked.rounds or 4
        asked.repeats = 1
    result = json.loads(asked.earlier.read_text()) if asked.earlier else results(asked)
    report(result)
    if asked.page is not None:
        fill(asked.page, tables(result))
    if asked.earlier is None:
        give(result, asked.result)


if __name__ == "__main__":
    main()
