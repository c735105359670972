"""Split learning against federated learning: what a client computes, holds, sends and waits for.

1. Five ways to divide a model (clients in turn; the U-shape, where labels stay; parallel; SplitFed
   v1 and v2), FedAvg, one worker that has all data, and clients that train alone, on the same
   clients, the same division of data and the same number of epochs. Every system trains with every
   rate of its setting; that one is shown with which the model has the least loss on the training
   examples in the end. To be reached is the accuracy that FedAvg has in the end.
2. The bytes of every run are compared with their formulas, to the byte; a run that differs ends the
   benchmark. Around the number of examples where split learning sends as much as FedAvg both are
   run on both sides of it.
3. What a client computes and holds, each part of a model in a process of its own
   (split_study/burden.py).
4. Seconds under the virtual clock with slow devices and links, and how long clients and server
   wait. Latency is not simulated: how often a client waits for an answer is counted.
5. Two hospitals with different columns of the same patients (split_study/hospitals.py).

    python benchmarks/study_split.py --data DIR --result benchmarks/results/study_split.json
    python benchmarks/study_split.py --from benchmarks/results/study_split.json \\
        --figures docs/images --page docs/study-split.md

DIR has the folders mnist, fashion-mnist, shakespeare and heart-disease. Training is on the first
few thousand examples of each, which the result names. It takes about a quarter of an hour on one
core; --quick a minute or two, with figures that say little. Progress goes to standard error, the
result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "split_study"))

from costs import Shape, Work, crossover, travels, trips
from hospitals import hospitals
from settings import SETTINGS, Setting
from split_page import draw, write_page

import dure
from dure.contracts.strategy import Strategy
from dure.data.examples import Examples
from dure.errors import LossNotFiniteError, TooFewClientsError
from dure.record.history import steps_to_target
from dure.record.run import Run

JSON = dict[str, Any]

SEED = 0
BESIDE = Path(__file__).parent / "split_study"
SERVER: JSON = {"server_mbit": 1000.0, "server_examples_per_second": 1000.0}
"""Of split learning's server: it computes ten times as fast as a client."""
PHONES = "phones"
CONDITIONS = {
    PHONES: "equal:100:6:2",
    "slow devices": "equal:10:6:2",
    "fast links": "equal:100:100:100",
    "stragglers": "stragglers:0.2:10:100:6:2",
}
"""Examples of the whole model a second, Mbit/s down and up; see docs/simulation.md."""
FORMULAS = {
    "FedAvg": "fed-avg",
    "split": "split",
    "split, U-shape": "split",
    "parallel split": "parallel",
    "SplitFed v1": "split-fed",
    "SplitFed v2": "split-fed",
}
ALONE = "each client alone"
AROUND = (0.5, 0.9, 1.1, 2.0)
"""Of the examples at which split learning and FedAvg send as much."""


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def systems(setting: Setting) -> dict[str, Strategy]:
    same: JSON = {
        "clients": setting.clients,
        "batch_size": setting.batch,
        "partition": setting.partition,
    }
    return {
        "one worker": dure.SingleWorker(setting.batch),
        "FedAvg": dure.FedAvg(fraction=1.0, local_epochs=1, **same),
        "split": dure.SplitLearning(cut=setting.cut, **same),
        "split, U-shape": dure.SplitLearning(cut=setting.cuts, **same),
        "parallel split": dure.ParallelSplit(cut=setting.cut, **same),
        "SplitFed v1": dure.SplitFed(cut=setting.cut, version=1, **same),
        "SplitFed v2": dure.SplitFed(cut=setting.cut, version=2, **same),
    }


def world_of(strategy: Strategy, devices: str) -> dure.World | None:
    """Simulated clients, and for split learning its server; None for one worker."""
    if strategy.traits.kind != "clients":
        return None
    conditions = {"devices": devices, **({} if strategy.name == "fed-avg" else SERVER)}
    return dure.Simulated(**conditions)


@torch.no_grad()
def loss_on(task: dure.Task, model: nn.Module, examples: Examples) -> float:
    """The mean loss."""
    model.eval()
    total = 0.0
    for start in range(0, len(examples), 500):
        some = torch.arange(start, min(start + 500, len(examples)))
        inputs, targets = examples.batch(some)
        loss = task.loss(model(inputs), targets)
        assert isinstance(loss, Tensor)
        total += loss.item() * len(some)
    return total / len(examples)


def told(loss: float) -> float | None:
    """As JSON can say it: None where it is not finite."""
    return loss if math.isfinite(loss) else None


# One system


def sizes_of(setting: Setting, task: dure.Task) -> list[int]:
    """The examples of each client; all systems have the same division."""
    found = {
        json.dumps(division.as_dict())
        for strategy in systems(setting).values()
        if strategy.traits.kind == "clients" and (division := strategy.division(task, SEED))
    }
    if len(found) != 1:
        raise ValueError("the systems divide the data in different ways")
    return list(json.loads(found.pop())["counts"])


def shape_of(run: Run, setting: Setting, burden: JSON) -> Shape:
    """Of the model as this run has cut it, which has to be the part whose burden was measured."""
    facts = run.summary["facts"][0].get("split")
    if facts is None:
        return Shape(0, 0, 0, 0, run.summary["parameters"])
    part = burden["ends" if len(facts["at"]) == 2 else "head"]
    example = facts["smashed_bytes"] // facts["examples"] // 4
    if facts["head_weights"] != part["weights"] or example != burden["head"]["values"]:
        raise ValueError(f"{facts} is not the part that was measured, {part}")
    targets = 0 if len(facts["at"]) == 2 else burden["target_bytes"]
    return Shape(
        part["values"], targets, part["weights"], part["tensors"], run.summary["parameters"]
    )


def check_bytes(name: str, run: Run, shape: Shape, work: Work, setting: Setting) -> int:
    """The bytes by the formula. Raises ValueError where the run has sent others."""
    formula = travels(FORMULAS[name], shape, work, setting.moments)
    measured = run.summary["bytes_sent"]
    if formula != measured:
        raise ValueError(f"{name}: {measured:,} bytes were sent, and {formula:,} by the formula")
    return formula


def check_trips(name: str, run: Run, work: Work) -> tuple[int, int]:
    """(of all clients, one after another) in a round; messages that were counted say the same."""
    facts = run.summary["facts"][0].get("split")
    cuts = len(facts["at"]) if facts else 1
    found = trips(FORMULAS[name], cuts, work)
    if facts:
        # The first head came from the server.
        counted = sum(facts["messages_sent"]) + (FORMULAS[name] == "split")
        if counted != work.rounds * found[0]:
            raise ValueError(f"{name}: {counted} waits were counted, not {work.rounds * found[0]}")
    return found


def waits(run: Run) -> JSON:
    """The shares of the virtual time in which clients and server had nothing to do."""
    elapsed = run.summary["numbers"]["virtual_seconds"]
    server, *clients = run.summary["per_worker"]
    busy = [one["compute_seconds"] + one["communication_seconds"] for one in clients]
    return {
        "client_idle": 1 - statistics.mean(busy) / elapsed,
        "client_computes": statistics.mean(one["compute_seconds"] for one in clients) / elapsed,
        # A federation's server computes on this machine's clock, and hardly anything.
        "server_idle": 1 - server["compute_seconds"] / elapsed if is_split(run) else None,
    }


def is_split(run: Run) -> bool:
    return "split" in run.summary["facts"][0]


def curve(run: Run, clients: int) -> JSON:
    """Test accuracy at every epoch, against epochs, bytes of a client and virtual seconds."""
    epochs, accuracy = run.history.curve("test_accuracy", "epoch")
    clock = dict(zip(*run.history.series("virtual_seconds"), strict=True))
    sent = [one.bytes_sent for one in run.history.evaluations]
    return {
        "epochs": epochs,
        "test_accuracy": accuracy,
        "seconds": [clock.get(one.step, 0.0) for one in run.history.evaluations],
        # Whatever is sent, a client sends or receives it; two of them if peers hand on.
        "client_bytes": [one / clients for one in sent],
    }


def tried(setting: Setting, data: Path, strategy: Strategy) -> tuple[float, Run, JSON]:
    """(rate, run, losses of all rates): the run of the rate with the least training loss."""
    best: tuple[float, float, Run] | None = None
    losses: JSON = {}
    for rate in setting.rates:
        task = setting.task(data, rate)
        world = world_of(strategy, CONDITIONS[PHONES])
        # A federation that refuses every update makes rounds and no epochs.
        stop = dure.Stop(epochs=setting.epochs, rounds=setting.epochs)
        try:
            run = dure.train(task, strategy, world, stop, seed=SEED, check=False)
        except (LossNotFiniteError, TooFewClientsError):
            losses[f"{rate:g}"] = None
            continue
        loss = loss_on(task, run.model, task.train)
        losses[f"{rate:g}"] = told(loss)
        if math.isfinite(loss) and (best is None or loss < best[0]):
            best = loss, rate, run
    if best is None:
        raise ValueError(f"{strategy.label} diverges with every rate of {setting.rates}")
    return best[1], best[2], losses


def measured(setting: Setting, data: Path, name: str, strategy: Strategy, burden: JSON) -> JSON:
    """One system: what came of it, and what it cost."""
    started = time.perf_counter()
    rate, run, losses = tried(setting, data, strategy)
    row: JSON = {
        "system": name,
        "rate": rate,
        "train_losses": losses,
        "test_accuracy": run.summary["test_accuracy"],
        "test_loss": run.summary["test_loss"],
        "curve": {},
    }
    if strategy.traits.kind == "clients":
        task = setting.task(data, rate)
        work = Work(sizes_of(setting, task), setting.batch, setting.epochs)
        shape = shape_of(run, setting, burden)
        together, in_a_row = check_trips(name, run, work)
        formula = check_bytes(name, run, shape, work, setting)
        row |= {
            "bytes": run.summary["bytes_sent"],
            "formula": formula,
            "client_bytes_per_epoch": client_bytes(run, work),
            "trips_of_a_client": together / work.clients,
            "trips_in_a_row": in_a_row,
            "seconds_per_epoch": under_conditions(setting, data, strategy, rate, run),
            **waits(run),
        }
    row["curve"] = curve(run, setting.clients)
    show(
        f"  {name}: {rate:g}, {row['test_accuracy']:.1%}, {row.get('bytes', 0) / 1e6:,.1f} MB; "
        f"{time.perf_counter() - started:.0f} s"
    )
    return row


def client_bytes(run: Run, work: Work) -> float:
    """What a client sends and receives in an epoch."""
    clients = run.summary["per_worker"][1:]
    total = sum(one["bytes_sent"] + one["bytes_received"] for one in clients)
    return float(total / work.clients / work.rounds)


def under_conditions(
    setting: Setting, data: Path, strategy: Strategy, rate: float, run: Run
) -> JSON:
    """Virtual seconds of the first epoch under each condition. What is learned is the same."""
    found: JSON = {}
    begun = run.history.steps[0]
    for name, devices in CONDITIONS.items():
        step = begun
        if name != PHONES:
            world = world_of(strategy, devices)
            task = setting.task(data, rate)
            again = dure.train(task, strategy, world, dure.Stop(rounds=1), seed=SEED, check=False)
            step = again.history.steps[0]
        if step.loss != begun.loss or step.numbers is None:
            raise ValueError(f"{strategy.label} has learned something else with {name}")
        found[name] = step.numbers["virtual_seconds"]
    return found


def alone(setting: Setting, data: Path) -> JSON:
    """Every client trains on its own examples, and nobody sends anything."""
    found = [alone_with(setting, data, rate) for rate in setting.rates]
    best = min(found, key=lambda one: one["loss"])
    show(f"  {ALONE}: {best['rate']:g}, {best['test_accuracy']:.1%}")
    return {**best, "train_losses": {f"{one['rate']:g}": told(one["loss"]) for one in found}}


def alone_with(setting: Setting, data: Path, rate: float) -> JSON:
    """With one rate: the loss on each client's own examples, and how their models do."""
    task = setting.task(data, rate)
    fed_avg = systems(setting)["FedAvg"]
    assert isinstance(fed_avg, dure.FedAvg)
    assert isinstance(task.train, Examples)
    count = len(task.train)
    parts = fed_avg.partition.divide(setting.clients, task.train, SEED)
    total = 0.0
    runs = []
    for part in parts:
        own = Examples(task.train.inputs[part], task.train.targets[part])
        mine = dataclasses.replace(task, train=own)
        worker = dure.SingleWorker(min(setting.batch, len(part)))
        stop = dure.Stop(epochs=setting.epochs)
        try:
            runs.append(dure.train(mine, worker, stop=stop, seed=SEED, check=False))
        except LossNotFiniteError:
            return {"system": ALONE, "rate": rate, "loss": math.inf, "test_accuracy": 0.0}
        total += loss_on(mine, runs[-1].model, own) * len(part)
    accuracies = [run.summary["test_accuracy"] for run in runs]
    return {
        "system": ALONE,
        "rate": rate,
        "loss": total / count,
        "test_accuracy": statistics.mean(accuracies),
        "worst_accuracy": min(accuracies),
        "test_loss": statistics.mean(run.summary["test_loss"] for run in runs),
    }


# A setting


def burden_of(setting: Setting, data: Path, processes: int) -> JSON:
    """What a client computes and holds, by part; medians over so many processes."""
    found: JSON = {}
    for part in ("whole", "head", "ends"):
        command = [sys.executable, "burden.py", setting.model, part, str(setting.batch)]
        told = [
            json.loads(
                subprocess.run(
                    command, cwd=BESIDE, check=True, capture_output=True, text=True
                ).stdout
            )
            for _ in range(processes)
        ]
        found[part] = {name: statistics.median(one[name] for one in told) for name in told[0]}
        found[part]["flops_per_example"] = found[part]["flops"] / setting.batch
    _, targets = setting.task(data, setting.rates[0]).train.batch(torch.tensor([0]))
    found["target_bytes"] = targets.nbytes
    return found


def reached(row: JSON, target: float) -> float | None:
    """After how many epochs, between two interpolated; None if never."""
    points = row.get("curve")
    if not points:
        return None
    return steps_to_target(points["epochs"], points["test_accuracy"], target)


def compared(setting: Setting, data: Path, burden: JSON) -> JSON:
    """All systems on one setting."""
    show(setting.title)
    rows = [
        measured(setting, data, name, strategy, burden)
        for name, strategy in systems(setting).items()
    ]
    target = next(row["test_accuracy"] for row in rows if row["system"] == "FedAvg")
    rows.insert(1, alone(setting, data))
    for row in rows:
        row["epochs_to_target"] = reached(row, target)
    task = setting.task(data, setting.rates[0])
    return {
        "title": setting.title,
        "cut": list(setting.cut),
        "cuts": list(setting.cuts),
        "clients": setting.clients,
        "batch": setting.batch,
        "epochs": setting.epochs,
        "partition": setting.partition,
        "rates": list(setting.rates),
        "sizes": sizes_of(setting, task),
        "train": len(task.train),
        "test": len(task.test) if task.test is not None else 0,
        "target": target,
        "model": setting.model,
        "rows": rows,
    }


# The crossover


def around(setting: Setting, data: Path, burden: JSON) -> JSON:
    """FedAvg and split learning with fewer and with more examples a client than even them out."""
    whole = burden["whole"]["weights"]
    part = burden["head"]
    shape = Shape(part["values"], burden["target_bytes"], part["weights"], part["tensors"], whole)
    even = crossover(shape)
    points = []
    for factor in AROUND:
        examples = max(1, round(factor * even))
        task = setting.task(data, setting.rates[0], train=2 * examples)
        same: JSON = {"clients": 2, "batch_size": setting.batch}
        ways = {
            "FedAvg": dure.FedAvg(fraction=1.0, local_epochs=1, **same),
            "SplitFed v1": dure.SplitFed(cut=setting.cut, version=1, **same),
        }
        point: JSON = {"examples": examples}
        work = Work([examples, examples], setting.batch, 1)
        for name, strategy in ways.items():
            world = world_of(strategy, CONDITIONS[PHONES])
            run = dure.train(task, strategy, world, dure.Stop(rounds=1), seed=SEED, check=False)
            check_bytes(name, run, shape, work, setting)
            point[name] = client_bytes(run, work)
        if (point["SplitFed v1"] < point["FedAvg"]) != (examples < even):
            raise ValueError(f"at {even:.1f} examples the formula turns, and {point} does not")
        points.append(point)
    show(f"  {setting.title}: as many bytes at {even:.1f} examples a client; {points}")
    return {
        "title": setting.title,
        "even": even,
        "points": points,
        "head_bytes": 2 * 4 * shape.client,
        "whole_bytes": 2 * 4 * whole,
        "example_bytes": 2 * 4 * shape.values + shape.targets,
    }


def measure(data: Path, quick: bool) -> JSON:
    started = time.perf_counter()
    settings = [setting.quick() if quick else setting for setting in SETTINGS]
    of_model = {setting.model: setting for setting in reversed(settings)}
    burdens = {
        model: burden_of(setting, data, 1 if quick else 3) for model, setting in of_model.items()
    }
    found = {setting.name: compared(setting, data, burdens[setting.model]) for setting in settings}
    show("crossover")
    crossings = {
        model: around(setting, data, burdens[model]) for model, setting in of_model.items()
    }
    show("hospitals")
    heart = hospitals(data, epochs=4 if quick else 30, seeds=1 if quick else 5)
    return {
        "quick": quick,
        "torch": torch.__version__,
        "seconds": time.perf_counter() - started,
        "conditions": CONDITIONS,
        "server": SERVER,
        "burdens": burdens,
        "settings": found,
        "crossover": crossings,
        "hospitals": heart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="the folder of the four data sets")
    parser.add_argument("--quick", action="store_true", help="a minute or two")
    parser.add_argument("--from", type=Path, dest="earlier", help="a result that is there already")
    parser.add_argument("--figures", type=Path, help="the folder for the figures")
    parser.add_argument("--page", type=Path, help="the page whose tables to fill")
    takes_result(parser)
    asked = parser.parse_args()
    if (asked.data is None) == (asked.earlier is None):
        parser.error("give --data, or --from with an earlier result")
    torch.set_num_threads(1)
    if asked.earlier is None:
        result = measure(asked.data.resolve(), asked.quick)
        give(result, asked.result, allow_nan=False)
    else:
        result = json.loads(asked.earlier.read_text())
    if asked.figures is not None:
        draw(result, asked.figures)
    if asked.page is not None:
        write_page(result, asked.page)


if __name__ == "__main__":
    main()
