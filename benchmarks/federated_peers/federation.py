"""What all programs of this folder share: the federation they train, and how they say how far they
are.

    python PROGRAM FEDERATION.npz [--processes N] [--threads N]

The file holds inputs and targets in the order of the clients, where each client's examples begin,
the clients of every round, the initial weights, and test data. A program trains FedAvg on it: in
each round every client of the cohort makes one epoch of SGD (lr 0.1, batches of 10, shuffled) from
the global weights, and the mean of their weights, weighted by their examples, is the new model. It
prints a line of JSON when a round is done and one at the end.

Nothing here imports more than numpy before it is needed: some peers live without torch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

LR = 0.1
BATCH = 10


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of a process that trains")
    return parser.parse_args()


class Federation:
    """inputs: (n, 1, h, h) float32; targets: (n,) int64; cohorts: (rounds, m), the clients of each
    round, ascending."""

    def __init__(self, file: Path) -> None:
        arrays = np.load(file)
        self.inputs = arrays["inputs"]
        self.targets = arrays["targets"]
        self.test_inputs = arrays["test_inputs"]
        self.test_targets = arrays["test_targets"]
        self.starts: list[int] = arrays["starts"].tolist()
        self.cohorts: list[list[int]] = arrays["cohorts"].tolist()
        self.weights = [arrays[name] for name in sorted(arrays.files) if name.startswith("weight")]
        self.clients = len(self.starts) - 1
        self.rounds = len(self.cohorts)
        self.model = "cnn" if self.weights[0].ndim == 4 else "mlp"

    def examples(self, client: int) -> slice:
        return slice(self.starts[client], self.starts[client + 1])

    def sizes(self, cohort: list[int]) -> list[int]:
        return [self.starts[client + 1] - self.starts[client] for client in cohort]

    @cached_property
    def tensors(self) -> tuple[Any, Any]:
        """Inputs and targets as torch sees them; no copy."""
        import torch

        return torch.from_numpy(self.inputs), torch.from_numpy(self.targets)

    def torch_model(self) -> Any:
        """The model with its initial weights."""
        import torch
        from torch import nn

        if self.model == "mlp":
            parts = [
                nn.Linear(64, 200),
                nn.ReLU(),
                nn.Linear(200, 200),
                nn.ReLU(),
                nn.Linear(200, 10),
            ]
            model = nn.Sequential(nn.Flatten(), *parts)
        else:
            first = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
            second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
            last = [nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10)]
            model = nn.Sequential(*first, *second, *last)
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), self.weights, strict=True):
                parameter.copy_(torch.from_numpy(weight))
        return model

    def accuracy(self, model: Any) -> float:
        """Of a torch model, on the test data."""
        import torch

        model.eval()
        with torch.no_grad():
            return self.accuracy_of(lambda inputs: model(torch.from_numpy(inputs)).numpy())

    def accuracy_of(self, scores: Callable[[Any], Any]) -> float:
        """The same of a function of arrays. 100 examples at a time: of all of them at once, the
        images between the layers would be the largest thing in memory, whoever has trained the
        model."""
        parts = range(0, len(self.test_targets), 100)
        predicted = [scores(self.test_inputs[at : at + 100]).argmax(1) for at in parts]
        return float((np.concatenate(predicted) == self.test_targets).mean())

    def shuffled(self, client: int) -> Iterator[tuple[Any, Any]]:
        """A client's batches of one epoch, as torch tensors."""
        import torch

        own = self.examples(client)
        inputs, targets = self.tensors
        order = torch.randperm(own.stop - own.start).add_(own.start)
        return zip(inputs[order].split(BATCH), targets[order].split(BATCH), strict=True)


def finished(round: int, when: float | None = None) -> None:
    """round: how many are done by now, or were at `when`."""
    print(json.dumps({"round": round, "time": time.time() if when is None else when}), flush=True)


def ended(accuracy: float, *packages: str) -> None:
    """accuracy: on the test data after the last round. packages: whose versions matter."""
    print(
        json.dumps({"accuracy": accuracy, "versions": {name: version(name) for name in packages}}),
        flush=True,
    )
