"""State of a metric over the batches of a rank.

A metric is added over batches (a pair, a `SumMetric`), or waits for all outputs and targets. Its
first batch shows the kind. A function that fails there, as AUC does on a batch of a single class,
waits: only a failure on everything is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dure.contracts.metric import Metric, SumMetric, as_number, as_sum, ratio
from dure.errors import DureError, described
from dure.tasks.metric_libraries import is_of_a_library, metric_of_all
from dure.tasks.sums import MetricSums, SumLeaf, form_of

UNSEEN = -1
"""In place of a number of sums: no batch has shown the kind yet."""


class MetricState:
    """The state of a metric.

    waits: whether it needs everything at once; None before the first batch. failure: its error on
    the first batch, if any.
    """

    def __init__(self, name: str, metric: Metric) -> None:
        self.name = name
        self.metric = metric
        # A library's metric is never a pair, even if it returns two numbers.
        self.waits: bool | None = is_of_a_library(metric) or None
        self.failure: Exception | None = None
        self._first: float | None = None
        # A pair is added as plain numbers, for speed: thousands of clients measure few examples
        # each.
        self._total = 0.0
        self._count = 0.0
        self._sums = torch.zeros(0, dtype=torch.float64)

    @property
    def size(self) -> int:
        """Number of sums; 0 if the metric waits, `UNSEEN` before the first batch."""
        if self.waits is None:
            return UNSEEN
        return 2 if self.is_pair else len(self._sums)

    @property
    def sums(self) -> Tensor:
        """Sums so far, float64 of shape (size,)."""
        if self.is_pair:
            return torch.tensor([self._total, self._count], dtype=torch.float64)
        return self._sums

    @property
    def is_pair(self) -> bool:
        """Whether every rank with the sums can finish them."""
        return not self.waits and not isinstance(self.metric, SumMetric)

    def told(self) -> MetricSums | None:
        """Return the sums, for addition to those of other parties.

        None if the metric waits, has seen no batch, or has sums of a user's own class.
        """
        if self.waits is not False:
            return None
        if self.is_pair:
            return MetricSums([self._total, self._count])
        form = form_of(
            tree_unflatten([SumLeaf(tuple(shape)) for shape in self._shapes], self._spec)
        )
        return None if form is None else MetricSums(self._sums.tolist(), form)

    def add(self, outputs: Any, targets: Any) -> None:
        """Add the next batch. Raises ValueError for a metric that gives no number."""
        if self.waits:
            return
        if isinstance(self.metric, SumMetric):
            self._add(self._called(self.metric.update, outputs, targets))
        elif self.waits is None:
            self._look(outputs, targets)
        else:
            self._add_pair(self._called(self.metric, outputs, targets))

    def _look(self, outputs: Any, targets: Any) -> None:
        """Determine the kind of a function from its first batch."""
        # A copy: the metric may modify its arguments, and get the same again later.
        mine = [_copied(outputs), _copied(targets)]
        try:
            # Warnings about a part, such as a missing class, say nothing about the whole.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = self._called(self.metric, *mine)
        except ValueError as error:
            self.failure = error
            self.waits = True
            return
        if _is_pair(value):
            self.waits = False
            self._add_pair(value)
        else:
            self._first = self._number(value)
            self.waits = True

    def finished(self, sums: Tensor) -> float:
        """Return the number for the sums over all batches of all ranks."""
        if self.is_pair:
            return ratio(*sums.tolist())
        assert isinstance(self.metric, SumMetric)
        return self._number(self._called(self.metric.compute, self._as_given(sums)))

    def of_all(self, outputs: Any, targets: Any) -> float:
        """Return the number of a waiting metric, on everything."""
        value = self._called(lambda *all_: metric_of_all(self.metric, *all_), outputs, targets)
        if _is_pair(value) and not is_of_a_library(self.metric):
            return ratio(*self._pair(value))
        return self._number(value)

    def of_the_first(self, outputs: Any, targets: Any) -> float:
        """Return `metric_of_all` for a first batch with everything, whose result may be cached."""
        return self.of_all(outputs, targets) if self._first is None else self._first

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except DureError:  # a lost rank, say, where the ranks compute it together
            raise
        except Exception as error:
            raise ValueError(
                f"the metric {self.name!r} failed: {' '.join(described(error).split())}"
            ) from error

    def _add(self, given: Any) -> None:
        leaves, spec = tree_flatten(given)
        try:
            tensors = [as_sum(leaf) for leaf in leaves]
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._refusal(given) from error
        shapes = [tensor.shape for tensor in tensors]
        if self.waits is None:
            if not sum(tensor.numel() for tensor in tensors):
                raise self._refusal(given)
            self._spec = spec
            self._shapes = shapes
            self._sums = torch.zeros(sum(map(torch.Tensor.numel, tensors)), dtype=torch.float64)
            self.waits = False
        if (spec, shapes) != (self._spec, self._shapes):
            raise ValueError(
                f"the metric {self.name!r} returns sums of shapes {_told(shapes)} for one batch "
                f"and {_told(self._shapes)} for another, but shapes have to be equal to be added"
            )
        self._sums += torch.cat([tensor.reshape(-1) for tensor in tensors])

    def _as_given(self, sums: Tensor) -> Any:
        """Return flat sums in the structure and the shapes that `update` returns."""
        parts = torch.split(sums, [shape.numel() for shape in self._shapes])
        shaped = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return tree_unflatten(shaped, self._spec)

    def _add_pair(self, value: Any) -> None:
        total, count = self._pair(value)
        self._total += total
        self._count += count

    def _pair(self, value: Any) -> tuple[float, float]:
        if not _is_pair(value):
            raise ValueError(
                f"the metric {self.name!r} returns a pair (sum, count) for one batch and "
                f"{_kind(value)} for another"
            )
        try:
            total, count = map(as_number, value)
            return total, count
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._refusal(value) from error

    def _number(self, value: Any) -> float:
        try:
            return as_number(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._refusal(value) from error

    def _refusal(self, value: Any) -> ValueError:
        return ValueError(
            f"the metric {self.name!r} returns {_kind(value)}, but has to return one number, or a "
            "pair (sum, count) of numbers; for sums of other shapes use dure.SumMetric(update, "
            "compute)"
        )


def _is_pair(value: Any) -> bool:
    # The exact type: a named tuple, such as a statistic with its p-value, is no sum and count.
    return type(value) is tuple


def _copied(tree: Any) -> Any:
    return tree.clone() if isinstance(tree, Tensor) else tree_map_only(Tensor, torch.clone, tree)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if type(value) is tuple:
        return f"({', '.join(map(_kind, value))})"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"an array of shape {list(shape)}"
    return repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"


def _told(shapes: list[torch.Size]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
