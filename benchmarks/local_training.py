"""One machine, one model: every way to keep its cores busy, in one run.

The same model from the same weights on the same batches, trained for the same number of examples by

    a plain loop on one thread and on all        only torch
    SingleWorker on one thread and on all, fed   dure's single worker; loaders read its batches
                                                 ahead
    a mini-batch per core                        DataParallel in Threads: scatter, replicas, a
                                                 master
    layers per core                              LayersPerCore: a pipeline of threads
    Hogwild in threads, in processes             updates without locks
    Hogwild by hand                              torch.multiprocessing, as in torch's own example
    DistributedDataParallel                      DataParallel in Processes: an all-reduce
    one GPU, fed by loaders, by plain torch      if there is one

All but Hogwild compute the same gradients up to the rounding of sums. torch.nn.DataParallel, the
peer of a mini-batch per core, divides batches over GPUs only. On CPUs it calls the module as it is,
so it has a row only if there are two GPUs.

Every repetition trains each way once, in another order; figures are medians and quartiles over the
repetitions. Seconds are those of training, without starts of processes and evaluations.
ms_per_batch is milliseconds for the examples of one batch. seconds_to_target is seconds until the
first evaluation (one an epoch) at which the accuracy is reached, null if it was not reached in any
repetition. The load of a way is what each of its workers did in a step, from its last repetition.

    python benchmarks/local_training.py [--data MNIST_FOLDER] \\
        --result benchmarks/results/local_training.json
    python benchmarks/local_training.py --page benchmarks/results/local_training.json

Progress and a table go to standard error, the result as JSON to standard output. The second line
writes the figures of a result into docs/local-training.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from rounds import quartiles
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.machine.cores import available_cores
from dure.randomness.seeds import shuffled

CORES = available_cores()

BEGIN = "<!-- figures of benchmarks/local_training.py -->"
END = "<!-- end of figures -->"

NO_PEER = (
    "torch.nn.DataParallel divides batches over GPUs only; here it would call the module as it is"
)


@dataclass(frozen=True)
class Case:
    """What is trained, and how long. target: an accuracy."""

    name: str
    task: dure.Task
    batch: int
    epochs: int
    target: float

    @property
    def examples(self) -> int:
        return len(self.task.train)


@dataclass(frozen=True)
class Trained:
    """How it went. evaluations: (seconds of training, accuracy) after every epoch. load: by worker,
    of a step."""

    seconds: float
    evaluations: list[tuple[float, float]]
    load: list[dict[str, Any]] | None = None

    def to(self, target: float) -> float | None:
        return next((seconds for seconds, accuracy in self.evaluations if accuracy >= target), None)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cases(data: Path | None, scale: float) -> list[Case]:
    """The built-in digits, and MNIST where its folder is given. scale: of the epochs."""
    few = max(1, round(scale))
    found = [
        Case(
            "digits mlp",
            dure.load_task("digits", model="mlp", lr=0.5),
            128,
            max(2, round(12 * scale)),
            0.9,
        ),
        Case(
            "digits cnn",
            dure.load_task("digits", model="cnn", lr=0.3),
            128,
            max(2, round(12 * scale)),
            0.9,
        ),
    ]
    if data is not None:
        found += [
            Case(
                "mnist mlp",
                part(dure.load_task("mnist", data=data, model="2nn"), 12_800),
                128,
                3 * few,
                0.88,
            ),
            Case(
                "mnist cnn",
                part(dure.load_task("mnist", data=data, model="cnn"), 1_920),
                128,
                2 * few,
                0.6,
            ),
        ]
    return found


def part(task: dure.Task, examples: int) -> dure.Task:
    """The first training examples, and the first 2,000 to test on."""
    train = task.train
    test = task.test
    return dataclasses.replace(
        task,
        train=dure.Examples(train.inputs[:examples], train.targets[:examples]),
        test=dure.Examples(test.inputs[:2_000], test.targets[:2_000]),
        reference=None,
    )


@torch.no_grad()
def accuracy(task: dure.Task, model: nn.Module, device: str = "cpu") -> float:
    """Of the model on the test data, on all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(CORES)
    model.eval()
    hits = (model(task.test.inputs.to(device)).argmax(1).cpu() == task.test.targets).float()
    model.train()
    torch.set_num_threads(threads)
    return float(hits.mean())


def train_epoch(
    task: dure.Task, model: nn.Module, optimizer: Any, batches: list[Tensor], device: str = "cpu"
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        inputs = task.train.inputs[batch].to(device)
        targets = task.train.targets[batch].to(device)
        task.loss(model(inputs), targets).backward()
        optimizer.step()


def plain(
    threads: int,
    case: Case,
    device: str = "cpu",
    wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
) -> Trained:
    """The loop that everybody writes."""
    torch.set_num_threads(threads)
    model = wrap(seeded_model(case.task, 0).to(device).train())
    optimizer = case.task.optimizer(model.parameters())
    seconds = 0.0
    evaluations = []
    for epoch in range(case.epochs):
        batches = list(shuffled(case.examples, 0, epoch).split(case.batch))
        started = time.perf_counter()
        train_epoch(case.task, model, optimizer, batches, device)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - started
        evaluations.append((seconds, accuracy(case.task, model, device)))
    return Trained(seconds, evaluations)


def hog(number: int, model: nn.Module, case: Case, start: Any, end: Any) -> None:
    """A process of Hogwild by hand."""
    torch.set_num_threads(1)
    optimizer = case.task.optimizer(model.parameters())
    for epoch in range(case.epochs):
        batches = list(shuffled(case.examples, 0, epoch).split(case.batch))[number::CORES]
        start.wait()
        train_epoch(case.task, model, optimizer, batches)
        end.wait()


def hogwild_by_hand(case: Case) -> Trained:
    """Processes that share a model, as torch's example of Hogwild has them; they meet after every
    epoch."""
    context = torch.multiprocessing.get_context("spawn")
    model = seeded_model(case.task, 0).train().share_memory()
    start = context.Barrier(CORES + 1)
    end = context.Barrier(CORES + 1)
    members = [
        context.Process(target=hog, args=(n, model, case, start, end), daemon=True)
        for n in range(CORES)
    ]
    for member in members:
        member.start()
    seconds = 0.0
    evaluations = []
    for _ in range(case.epochs):
        start.wait(300)
        started = time.perf_counter()
        end.wait(600)
        seconds += time.perf_counter() - started
        evaluations.append((seconds, accuracy(case.task, model)))
    for member in members:
        member.join()
    return Trained(seconds, evaluations)


def by_dure(
    strategy: Callable[[int], Any], world: Callable[[], Any], threads: int, case: Case
) -> Trained:
    torch.set_num_threads(threads)
    chosen = strategy(case.batch)
    per_epoch = 1 if chosen.unit == "round" else -(-case.examples // case.batch)
    run = dure.train(
        case.task, chosen, world(), dure.Stop(epochs=case.epochs), seed=0, evaluate_every=per_epoch
    )
    evaluations = [
        (one.seconds, one.metrics["test_accuracy"] or 0.0) for one in run.history.evaluations[1:]
    ]
    steps = case.epochs * -(-case.examples // case.batch)
    load = [load_of(worker, steps) for worker in run.summary["per_worker"]]
    return Trained(run.summary["seconds"], evaluations, load)


def load_of(worker: dict[str, Any], steps: int) -> dict[str, Any]:
    """What a worker did in one step."""
    row = {"name": worker["name"]}
    for kind in ("compute", "communication", "idle"):
        row[f"{kind}_ms"] = worker[f"{kind}_seconds"] / steps * 1e3
    for way in ("sent", "received"):
        row[f"{way}_bytes"] = worker[f"bytes_{way}"] / steps
    return row


def ways() -> dict[str, Callable[[Case], Trained]]:
    here = partial(dure.Processes, 1)
    threads = partial(dure.Threads, CORES)
    processes = partial(dure.Processes, CORES)
    found: dict[str, Callable[[Case], Trained]] = {
        "plain loop, 1 thread": partial(plain, 1),
        f"plain loop, {CORES} threads": partial(plain, CORES),
        "SingleWorker, 1 thread": partial(by_dure, dure.SingleWorker, here, 1),
        f"SingleWorker, {CORES} threads": partial(by_dure, dure.SingleWorker, here, CORES),
        "SingleWorker, 1 loader": partial(
            by_dure, partial(dure.SingleWorker, loaders=1), here, CORES
        ),
        f"a mini-batch per core, {CORES} threads": partial(
            by_dure, dure.DataParallel, threads, CORES
        ),
        f"layers per core, {CORES} threads": partial(by_dure, dure.LayersPerCore, threads, CORES),
        f"Hogwild, {CORES} threads": partial(by_dure, dure.Hogwild, threads, CORES),
        f"Hogwild, {CORES} processes": partial(by_dure, dure.Hogwild, processes, CORES),
        f"Hogwild by hand, {CORES} processes": hogwild_by_hand,
        f"DDP, {CORES} processes": partial(by_dure, dure.DataParallel, processes, CORES),
    }
    if torch.cuda.is_available():
        on_gpu = partial(dure.SingleWorker, device="cuda")
        found["plain loop, GPU"] = partial(plain, CORES, device="cuda")
        found["SingleWorker, GPU"] = partial(by_dure, on_gpu, here, CORES)
        found["SingleWorker, GPU, 2 loaders"] = partial(
            by_dure, partial(on_gpu, loaders=2), here, CORES
        )
    if torch.cuda.device_count() > 1:
        gpus = torch.cuda.device_count()
        found[f"torch.nn.DataParallel, {gpus} GPUs"] = partial(
            plain, CORES, device="cuda", wrap=nn.DataParallel
        )
        found[f"a mini-batch per GPU, {gpus} GPUs"] = partial(
            by_dure, dure.DataParallel, dure.Threads, CORES
        )
    return found


def measured(case: Case, repeat: int) -> dict[str, Any]:
    """Every way, `repeat` times."""
    runs: dict[str, list[Trained]] = {name: [] for name in ways()}
    for repetition in range(repeat):
        order = list(ways().items())
        random.Random(repetition).shuffle(order)
        for name, way in order:
            runs[name].append(way(case))
        show(f"{case.name}: repetition {repetition + 1} of {repeat}")
    total = case.epochs * case.examples
    base = [one.seconds for one in runs["plain loop, 1 thread"]]
    rows = []
    for name, trained in runs.items():
        reached = [seconds for one in trained if (seconds := one.to(case.target)) is not None]
        ratios = [mine / own.seconds for mine, own in zip(base, trained, strict=True)]
        rows.append(
            {
                "way": name,
                "ms_per_batch": quartiles(
                    [one.seconds * case.batch / total * 1e3 for one in trained]
                ),
                "times_faster_than_one_thread": quartiles(ratios),
                "seconds_to_target": quartiles(reached) if len(reached) == repeat else None,
                "accuracy": statistics.median(one.evaluations[-1][1] for one in trained),
                "load": trained[-1].load,
            }
        )
        show(line(rows[-1]))
    about = {
        "case": case.name,
        "batch": case.batch,
        "epochs": case.epochs,
        "examples": case.examples,
    }
    parameters = sum(parameter.numel() for parameter in case.task.model().parameters())
    return {**about, "parameters": parameters, "target": case.target, "rows": rows}


def line(row: dict[str, Any]) -> str:
    low, high = row["ms_per_batch"]["quartiles"]
    reached = row["seconds_to_target"]
    until = f"{reached['median']:7.2f} s" if reached else "      -  "
    faster = row["times_faster_than_one_thread"]["median"]
    spread = f"({low:.2f} to {high:.2f})"
    time_of_a_batch = f"{row['ms_per_batch']['median']:8.2f} ms {spread:<20}"
    about = f"  {row['way']:<36} {time_of_a_batch} {faster:5.2f}x"
    return f"{about}  to the target {until}  {row['accuracy']:.3f}"


def table(case: dict[str, Any]) -> str:
    """The rows of a case, as Markdown."""
    target = f"{100 * case['target']:.0f} %"
    lines = [
        f"| way | a batch of {case['batch']} | against one thread | until {target} |",
        "| --- | --- | --- | --- |",
    ]
    for row in case["rows"]:
        low, high = row["ms_per_batch"]["quartiles"]
        reached = row["seconds_to_target"]
        until = f"{reached['median']:.2f} s" if reached else "not always"
        time_of_a_batch = f"{row['ms_per_batch']['median']:.2f} ms ({low:.2f} to {high:.2f})"
        faster = f"{row['times_faster_than_one_thread']['median']:.2f}x"
        lines.append(f"| {row['way']} | {time_of_a_batch} | {faster} | {until} |")
    return "\n".join(lines)


def loads(case: dict[str, Any]) -> str:
    """What a master and its workers do in a step beside what ranks do, as Markdown."""
    lines = [
        "| way | worker | computes | moves data | waits | sends | receives |",
        "| --- " * 7 + "|",
    ]
    for row in case["rows"]:
        if row["way"].startswith(("a mini-batch per core", "DDP", "layers per core")):
            for one in row["load"]:
                times = " | ".join(
                    f"{one[f'{kind}_ms']:.2f} ms" for kind in ("compute", "communication", "idle")
                )
                moved = " | ".join(
                    f"{one[f'{way}_bytes'] / 1e3:,.0f} kB" for way in ("sent", "received")
                )
                lines.append(
                    f"| {row['way'].partition(',')[0]} | {one['name']} | {times} | {moved} |"
                )
    return "\n".join(lines)


def write_page(result: dict[str, Any], page: Path) -> None:
    """Puts the figures of a result between the marks of the page."""
    gpu = result["gpu"] or "no GPU"
    parts = [
        f"{result['cores']} cores, {gpu}, torch {result['torch']}; medians and quartiles of "
        f"{result['repetitions']} "
        "repetitions in which all ways take turns. The time of a batch is the time of training "
        "alone, for the examples of a single batch; each way is compared with the plain loop on "
        "one thread of the same repetition."
    ]
    for case in result["cases"]:
        parts += [f"**{case['case']}**, {case['parameters']:,} parameters:", table(case)]
    first = result["cases"][-1]
    parts += [f"Work of each worker in a step of **{first['case']}**:", loads(first)]
    if result["torch_nn_data_parallel"] == NO_PEER:
        parts.append("torch.nn.DataParallel has no row: it divides batches over GPUs only.")
    text = page.read_text()
    before = text[: text.index(BEGIN) + len(BEGIN)]
    after = text[text.index(END) :]
    page.write_text("\n\n".join([before, *parts, after]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a folder with the four files of MNIST")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the epochs; below 1 to try it out"
    )
    parser.add_argument(
        "--page", type=Path, help="a result whose figures are written into the documentation"
    )
    takes_result(parser)
    asked = parser.parse_args()
    if asked.page is not None:
        write_page(
            json.loads(asked.page.read_text()),
            Path(__file__).parents[1] / "docs" / "local-training.md",
        )
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {"benchmark": "local_training", "cores": CORES, "gpu": gpu, "torch": torch.__version__}
    about |= {
        "repetitions": asked.repeat,
        "torch_nn_data_parallel": NO_PEER if torch.cuda.device_count() < 2 else "has a row",
    }
    found = [measured(case, asked.repeat) for case in cases(asked.data, asked.scale)]
    give({**about, "cases": found}, asked.result)


if __name__ == "__main__":
    main()
