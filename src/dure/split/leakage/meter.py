"""Leakage meter in a simulated run: attacks on the values that the server receives in a round.

The meter observes the messages to the server, and uses the true labels and inputs. Batches are
collected into windows of 128 examples; each window is measured and discarded, and the median over a
round's windows goes into the history:

    norm_leak_auc, direction_leak_auc    labels, from the gradients at the second cut (two cuts)
    cluster_leak_auc                     labels, from the output of the heads
    distance_correlation                 between inputs and the output of the heads

So the memory is that of a single window, whatever the length of a round: of a larger batch the
first 512 examples are measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dure.fleet.virtual_network import Envelope, Message, Node
from dure.split.leakage.distance_correlation import distance_correlation
from dure.split.leakage.guard import CutValue
from dure.split.leakage.labels import clusters_auc, direction_auc, norm_auc
from dure.split.leakage.rows import as_rows, numbers_of
from dure.split.messages import OutputGradients, Smashed

WINDOW = 128
"""Minimum number of examples that are measured together."""

MOST = 512
"""Maximum number of examples of a batch that are measured."""

_LEFT = 32
"""Minimum number of examples of an open window that is measured at the end of a round."""


@dataclass
class MeasurementWindow:
    """Batches that are measured together."""

    measure: Callable[..., Mapping[str, float]]
    parts: list[tuple[Tensor, ...]] = field(default_factory=list)
    examples: int = 0

    def add(self, *rows: Tensor) -> Mapping[str, float]:
        """Add a batch, as matrices with a row per example; return the metrics of a full window."""
        self.parts.append(tuple(each[:MOST].detach().to("cpu", copy=True) for each in rows))
        self.examples += len(self.parts[-1][0])
        return self.close() if self.examples >= WINDOW else {}

    def close(self) -> Mapping[str, float]:
        """Measure the collected batches, and empty the window."""
        parts = self.parts
        self.parts = []
        self.examples = 0
        together = [torch.cat(each) for each in zip(*parts, strict=True)]
        return self.measure(*together)

    def drop(self) -> None:
        """Empty the window."""
        self.parts = []
        self.examples = 0


class LeakMeter:
    """Leakage meter of a run.

    labels: of all examples, int64 of shape (n,); None if the task has no class labels. leaving,
    arriving: the values that cross the first cut, and the last cut.
    """

    def __init__(
        self,
        labels: Tensor | None,
        classes: int,
        leaving: Sequence[CutValue],
        arriving: Sequence[CutValue],
    ) -> None:
        self.labels = labels
        self.classes = classes
        self._leaving = [one.dim for one in leaving]
        self._arriving = [one.dim for one in arriving if one.differentiable]
        self._values = MeasurementWindow(self._of_values)
        self._gradients = MeasurementWindow(self._of_gradients)
        self._inputs = MeasurementWindow(self._of_inputs)
        self._windows = (self._gradients, self._values, self._inputs)
        self._found: dict[str, list[float]] = {}
        self.latest: dict[str, float] = {}
        """Metrics of the newest round."""

    def smashed(self, leaving: Sequence[Tensor], indices: Tensor, inputs: Sequence[Any]) -> None:
        """Record the output of a head.

        indices: of the examples in the data. inputs: leaves of the model's inputs.
        """
        values = _rows(leaving, self._leaving)
        if values is None:
            return
        if self.labels is not None:
            self._take(self._values.add(values, self.labels[indices]))
        numbers = numbers_of(inputs)
        if numbers is not None and len(numbers) == len(values):
            self._take(self._inputs.add(numbers, values))

    def gradients(self, leaving: Sequence[Tensor], indices: Tensor) -> None:
        """Record the gradients that the party with the labels sends."""
        rows = _rows(leaving, self._arriving)
        if rows is not None and self.labels is not None:
            self._take(self._gradients.add(rows, self.labels[indices]))

    def numbers(self) -> dict[str, float]:
        """Return the medians of the finished round, by metric."""
        for window in self._windows:
            if window.examples >= _LEFT:
                self._take(window.close())
            window.drop()
        self.latest = self.measured()
        return self.latest

    def measured(self) -> dict[str, float]:
        """Return the medians of the windows closed since the last call; open windows stay open."""
        found = self._found
        self._found = {}
        return {name: statistics.median(values) for name, values in found.items()}

    def state(self) -> list[list[list[Tensor]]]:
        """Return the batches of the open windows; call after `measured` or `numbers`."""
        return [[list(part) for part in window.parts] for window in self._windows]

    def restore(self, state: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        """Restore a `state`."""
        for window, parts in zip(self._windows, state, strict=True):
            window.drop()
            for part in parts:
                window.add(*part)

    def _take(self, measured: Mapping[str, float]) -> None:
        for name, value in measured.items():
            if not math.isnan(value):
                self._found.setdefault(name, []).append(value)

    def _of_values(self, values: Tensor, labels: Tensor) -> Mapping[str, float]:
        return {"cluster_leak_auc": clusters_auc(values, labels, self.classes)}

    def _of_gradients(self, rows: Tensor, labels: Tensor) -> Mapping[str, float]:
        return {
            "norm_leak_auc": norm_auc(rows, labels, self.classes),
            "direction_leak_auc": direction_auc(rows, labels, self.classes),
        }

    def _of_inputs(self, inputs: Tensor, values: Tensor) -> Mapping[str, float]:
        return {"distance_correlation": float(distance_correlation(inputs, values.to(inputs)))}


class MeteredServer:
    """Wrapper around the server that passes its messages to the meter.

    held: returns, by the name of a client, the indices of its current batch and its inputs' leaves.
    """

    def __init__(
        self,
        server: Node,
        meter: LeakMeter,
        held: Callable[[str], tuple[Tensor, Sequence[Any]]],
    ) -> None:
        self.server = server
        self.meter = meter
        self.held = held

    @property
    def wake(self) -> float:
        return self.server.wake

    def tick(self, now: float) -> list[Envelope]:
        return self.server.tick(now)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        if isinstance(message, Smashed):
            self.meter.smashed(message.values, *self.held(sender))
        elif isinstance(message, OutputGradients):
            self.meter.gradients(message.values, self.held(sender)[0])
        return self.server.receive(sender, message, now)


def _rows(values: Sequence[Tensor], dims: Sequence[int | None]) -> Tensor | None:
    """Return the floating-point values with a row per example, as a matrix; None without any."""
    own = [
        (value, dim)
        for value, dim in zip(values, dims, strict=True)
        if dim is not None and value.is_floating_point()
    ]
    return as_rows([value for value, _ in own], [dim for _, dim in own]) if own else None
