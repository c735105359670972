"""What accuracy is left at an epsilon: by DP-SGD on one machine and in hospitals, and by DP-FedAvg.

Every setting is trained without privacy, with clipped gradients or updates and no noise, and with
the noise that the accountant chooses for each epsilon. Clips, rates and batches are the same for
all epsilons. They were chosen by hand, by a few trials at one epsilon, on the test data.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dure
from dure.contracts.strategy import Strategy
from dure.data.examples import Examples
from dure.data.partition import NaturalKey
from dure.federated.privacy.privacy_settings import Privacy, parse_privacy
from dure.privacy.accountant import noise_for
from dure.record.run import Run
from dure.tasks.models import TwoNN

JSON = dict[str, Any]

DELTA = 1e-5
EPSILONS = (1.0, 3.0, 8.0)
PLAIN = "no privacy"
CLIPPED = "clipped"
ROUNDS = 20
"""Of a federation."""


class SmallCNN(nn.Sequential):
    """The CNN of the DP-SGD papers: 26,010 weights, bounded activations.

    Source: N. Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential
    Privacy", AAAI 2021.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        )


@dataclass(frozen=True)
class Setting:
    """What is trained, and what of it is protected.

    unit: whose privacy. load: the task by the folder of the data. strategy: by its `privacy` and
    `epsilon`; plain: without any, with a rate of its own. length: epochs of one worker, rounds of
    a federation. protection: the text of `privacy` without noise.
    """

    name: str
    title: str
    unit: str
    load: Callable[[Path], dure.Task]
    strategy: Callable[..., Strategy]
    plain: Callable[[], Strategy]
    protection: str
    rate: float
    plain_rate: float
    length: dure.Stop
    epsilons: Sequence[float] = EPSILONS
    seeds: int = 1

    def quick(self) -> Setting:
        """The same in a few seconds, which says little."""
        stop = self.length
        short = dure.Stop(
            rounds=min(2, stop.rounds) if stop.rounds else None,
            epochs=min(1, stop.epochs) if stop.epochs else None,
        )
        return dataclasses.replace(
            self,
            load=partial(_fewer, self.load),
            length=short,
            epsilons=self.epsilons[-1:],
            seeds=1,
        )


def _fewer(load: Callable[[Path], dure.Task], data: Path) -> dure.Task:
    task = load(data)
    assert task.test is not None
    return dataclasses.replace(task, train=_first(task.train), test=_first(task.test))


def _first(examples: Examples, count: int = 6000) -> Examples:
    return Examples(
        examples.inputs[:count],
        examples.targets[:count],
        classes=examples.classes,
        keys=None if examples.keys is None else examples.keys[:count],
    )


# Tasks


@cache
def _pictures(name: str, model: Callable[[], nn.Module], data: Path) -> dure.Task:
    task = dure.load_task(name, data=data / name, model="cnn")
    return dataclasses.replace(task, model=model)


@cache
def _heart(data: Path) -> dure.Task:
    return dure.load_task("heart", data=data / "heart-disease")


# Settings


def _central(data: str, title: str, rate: float) -> Setting:
    """Pictures on one machine."""
    return Setting(
        name=data if rate > 1 else f"{data}-slow",
        title=f"{title}, small CNN, rate {rate:g}",
        unit="example",
        load=partial(_pictures, data, SmallCNN),
        strategy=partial(dure.SingleWorker, 512),
        plain=partial(dure.SingleWorker, 64),
        protection="dp-sgd:1:0:seed",
        rate=rate,
        plain_rate=0.1,
        length=dure.Stop(epochs=2),
    )


def _clients(name: str, title: str, data: str, clients: int) -> Setting:
    """The same pictures, as those of so many clients, of whom 100 make six steps in a round."""
    same: JSON = {
        "clients": clients,
        "fraction": 100 / clients,
        "batch_size": 10,
        "local_steps": 6,
    }
    return Setting(
        name=name,
        title=title,
        unit="client",
        load=partial(_pictures, data, TwoNN),
        strategy=partial(dure.FedAvg, **same),
        plain=partial(dure.FedAvg, **same),
        protection="user-level:1",
        rate=0.1,
        plain_rate=0.1,
        length=dure.Stop(rounds=ROUNDS),
        epsilons=(3.0, 8.0),
    )


def _hospitals(
    privacy: str = "none", epsilon: float | None = None, delta: float = DELTA
) -> dure.FedAvg:
    """Each takes all its patients in every step, and makes one a round: so all have one epsilon.

    The noise is chosen here: for hospitals of different sizes dure has none for an epsilon.
    """
    if epsilon is not None:
        kind, clip, *_ = privacy.split(":")
        privacy = f"{kind}:{clip}:{noise_for(epsilon, delta, 1.0, ROUNDS)}"
    return dure.FedAvg(
        clients=None,
        partition=NaturalKey(),
        fraction=1.0,
        batch_size=None,
        local_epochs=1,
        privacy=parse_privacy(privacy),
        delta=delta,
    )


def _patients(name: str, title: str, way: Callable[..., Strategy], length: dure.Stop) -> Setting:
    """Patients, each of whom is one example."""
    return Setting(
        name=name,
        title=title,
        unit="person",
        load=_heart,
        strategy=way,
        plain=way,
        protection="dp-sgd:1:0:seed",
        rate=1.0,
        plain_rate=1.0,
        length=length,
        seeds=10,
    )


SETTINGS = [
    _central("mnist", "MNIST", 4.0),
    _central("mnist", "MNIST", 1.0),
    _central("fashion-mnist", "Fashion-MNIST", 4.0),
    _central("fashion-mnist", "Fashion-MNIST", 1.0),
    _patients("heart", "heart, one machine", partial(dure.SingleWorker, 256), dure.Stop(epochs=20)),
    _patients("heart-4", "heart, four hospitals", _hospitals, dure.Stop(rounds=ROUNDS)),
    _clients("mnist-200", "MNIST, 2NN, 200 clients of 300", "mnist", 200),
    _clients("mnist-1000", "MNIST, 2NN, 1,000 clients of 60", "mnist", 1000),
    _clients("mnist-6000", "MNIST, 2NN, 6,000 clients of 10", "mnist", 6000),
    _clients("fashion-1000", "Fashion-MNIST, 2NN, 1,000 clients of 60", "fashion-mnist", 1000),
]


# Runs


def ways(setting: Setting) -> Iterator[tuple[str, float, Strategy]]:
    """The name of each way, its learning rate, and who trains."""
    yield PLAIN, setting.plain_rate, setting.plain()
    yield CLIPPED, setting.rate, setting.strategy(privacy=setting.protection)
    for epsilon in reversed(setting.epsilons):
        strategy = setting.strategy(privacy=setting.protection, epsilon=epsilon, delta=DELTA)
        yield f"{epsilon:g}", setting.rate, strategy


def accuracy(setting: Setting, data: Path, show: Callable[[str], None]) -> JSON:
    """A row for each way, with means over the seeds."""
    task = setting.load(data)
    rows = []
    for way, rate, strategy in ways(setting):
        started = time.process_time()
        planned = strategy.planned(task, setting.length)
        runs = [
            dure.train(
                dataclasses.replace(task, optimizer=partial(torch.optim.SGD, lr=rate)),
                planned,
                stop=setting.length,
                seed=seed,
                evaluate_every=10**9,
                check=False,
            )
            for seed in range(setting.seeds)
        ]
        row = {"way": way, "rate": rate, "noise": noise_of(planned), **told(runs)}
        if row["epsilon"] is not None and row["epsilon"] > float(way):
            raise ValueError(f"{setting.title}: {row['said']}, and {way} was asked for")
        rows.append(row)
        seconds = time.process_time() - started
        show(f"  {way}: {row['test_accuracy']:.4f}, noise {row['noise']}, {seconds:.0f} s")
    return {
        "title": setting.title,
        "unit": setting.unit,
        "protection": setting.protection,
        "train": len(task.train),
        "test": len(task.test) if task.test is not None else 0,
        "weights": runs[0].summary["parameters"],
        "length": dataclasses.asdict(setting.length),
        "seeds": setting.seeds,
        "rows": rows,
    }


def noise_of(strategy: Strategy) -> float | None:
    """The noise multiplier; None without noise."""
    privacy = getattr(strategy, "privacy", None)
    if isinstance(privacy, Privacy):
        privacy = privacy.user or privacy.example
    return None if privacy is None else privacy.noise or None


def told(runs: Sequence[Run]) -> JSON:
    """What came of it. epsilon: that the accountant says in the end; None without noise."""
    accuracies = [run.summary["test_accuracy"] for run in runs]
    facts = (runs[0].summary.get("facts") or [{}])[0]
    promise = (facts.get("promises") or [{}])[0]
    return {
        "test_accuracy": statistics.mean(accuracies),
        "of each": accuracies,
        "epsilon": promise.get("epsilon"),
        "said": promise.get("said"),
    }
