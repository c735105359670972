"""What the systems of the study are compared on: tasks, where models are cut, and who has what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

import dure
from dure.data.examples import Examples
from dure.tasks.models import CNN, Transformer, TransformerBlock, TwoNN

WIDTH = 64
LENGTH = 64
"""Of the transformer's layers and of its sequences."""
SYMBOLS = 67
"""Of the text."""


@dataclass(frozen=True)
class Setting:
    """A task, and how it is divided.

    load: the task by the folder of the data. model: the name of its parts. cut, cuts: of one, and
    of the U-shape. rates: that every system is tried with. train, test: how many examples are taken
    of the published ones, from the first. moments: what the optimizer remembers of a weight.
    """

    name: str
    title: str
    load: Callable[[Path], dure.Task]
    model: str
    cut: tuple[str, ...]
    cuts: tuple[str, ...]
    clients: int
    batch: int
    epochs: int
    partition: str
    rates: Sequence[float]
    train: int
    test: int
    moments: int = 0

    def task(self, data: Path, rate: float, train: int | None = None) -> dure.Task:
        """The task on so many examples, with a learning rate."""
        task = self.load(data)
        assert task.test is not None
        optimizer = torch.optim.AdamW if self.moments else torch.optim.SGD
        return dataclasses.replace(
            task,
            train=first(task.train, train or self.train),
            test=first(task.test, self.test),
            optimizer=partial(optimizer, lr=rate),
        )

    def quick(self) -> Setting:
        """The same in a few seconds."""
        return dataclasses.replace(
            self,
            epochs=2,
            rates=self.rates[1:2],
            train=self.train // 4,
            test=self.test // 4,
        )


def first(examples: Examples, count: int) -> Examples:
    return Examples(examples.inputs[:count], examples.targets[:count], classes=examples.classes)


@cache
def _mnist(data: Path) -> dure.Task:
    return dure.load_task("mnist", data=data / "mnist", model="2nn")


@cache
def _fashion(data: Path) -> dure.Task:
    return dure.load_task("fashion-mnist", data=data / "fashion-mnist", model="cnn")


@cache
def _shakespeare(data: Path) -> dure.Task:
    return dure.load_task(
        "shakespeare",
        data=data / "shakespeare" / "tinyshakespeare.txt",
        model="transformer",
        sequence_length=LENGTH,
        width=WIDTH,
    )


_MNIST = Setting(
    name="mnist",
    title="MNIST, 2NN",
    load=_mnist,
    model="2nn",
    cut=("1",),
    cuts=("1", "2"),
    clients=10,
    batch=20,
    epochs=8,
    partition="iid",
    rates=(0.03, 0.1, 0.3, 1.0),
    train=4000,
    test=2000,
)

SETTINGS = [
    _MNIST,
    dataclasses.replace(
        _MNIST, name="mnist-skewed", title="MNIST, 2NN, skewed", partition="dirichlet:0.3"
    ),
    Setting(
        name="fashion",
        title="Fashion-MNIST, CNN, skewed",
        load=_fashion,
        model="cnn",
        cut=("1",),
        cuts=("1", "3"),
        clients=10,
        batch=20,
        epochs=6,
        partition="dirichlet:0.5",
        rates=(0.03, 0.1, 0.3),
        train=2000,
        test=1000,
    ),
    Setting(
        name="shakespeare",
        title="Shakespeare, transformer",
        load=_shakespeare,
        model="transformer",
        cut=("blocks.1",),
        cuts=("blocks.1", "norm"),
        clients=5,
        batch=10,
        epochs=4,
        partition="iid",
        rates=(0.001, 0.003),
        train=1000,
        test=200,
        moments=2,
    ),
]


# What a client has of a model: the modules alone, as they lie on both sides of a cut


class TransformerHead(nn.Module):
    """The first block, and what comes before."""

    def __init__(self, whole: Transformer) -> None:
        super().__init__()
        self.embedding = whole.embedding
        self.position = whole.position
        block = whole.blocks[0]
        assert isinstance(block, TransformerBlock)
        self.block = block

    def forward(self, indices: Tensor) -> Tensor:
        places = torch.arange(indices.shape[1])
        hidden: Tensor = self.block(self.embedding(indices) + self.position(places))
        return hidden


class TransformerEnd(nn.Module):
    """Behind the last block."""

    def __init__(self, whole: Transformer) -> None:
        super().__init__()
        self.norm = whole.norm
        self.output = whole.output

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.output(self.norm(hidden))
        return scores.transpose(1, 2)


@dataclass(frozen=True)
class Parts:
    """A model undivided, and what a client has of it. between: the shape of an example's values at
    the second cut. optimizer: of the task."""

    whole: nn.Module
    head: nn.Module
    end: nn.Module
    between: tuple[int, ...]
    inputs: Callable[[int], tuple[Tensor, Tensor]]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _pictures(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))


def _characters(batch: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, SYMBOLS, (2, batch, LENGTH))
    return text[0], text[1]


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.001)


def parts_of(name: str) -> Parts:
    """Of a model, by its name in the settings."""
    if name == "2nn":
        model = TwoNN()
        layers = model.layers
        return Parts(model, layers[:3], layers[5:], (200,), _pictures, _sgd)
    if name == "cnn":
        cnn = CNN()
        return Parts(cnn, cnn.features[:3], cnn.classifier[3:], (512,), _pictures, _sgd)
    whole = Transformer(SYMBOLS, context=LENGTH, width=WIDTH)
    head = TransformerHead(whole)
    return Parts(whole, head, TransformerEnd(whole), (LENGTH, WIDTH), _characters, _adam)
