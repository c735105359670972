"""Metrics: a number over all test examples, wherever they are computed.

    sums      update(outputs, targets) of a batch; added over batches and ranks, finished once
    function  metric(outputs, targets), called once, on all outputs and targets

Sums need no memory and express more than means: a confusion matrix contains F1, a histogram of
scores AUC. A function is simpler, but its arguments have to fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Metric = Callable[[Any, Any], Any]
"""metric(outputs, targets) returns a number, or a pair (sum, count).

Pairs are added over batches and divided once: a pair is the `SumMetric` of a mean. A function that
returns a number is called once, on all outputs and targets. Functions of scikit-learn, and
functions and objects of torchmetrics and torcheval, are valid metrics too
(`dure.tasks.metric_libraries`).
"""


@dataclass(frozen=True)
class SumMetric:
    """Metric computed from sums of any shape.

    update: update(outputs, targets) returns the terms of a batch: a tensor, or a tuple, list or
    dict of
        tensors and numbers, of the same shapes for every batch. Outputs and targets are on the
        model's
        device.
    compute: compute(sums) returns the metric from the sums over all batches, which have the
    structure
        and the shapes of `update`'s result, as float64 on the CPU. Called once.

    Calling the object returns the metric of a single batch.
    """

    update: Callable[[Any, Any], Any]
    compute: Callable[[Any], Any]

    def __post_init__(self) -> None:
        for name in ("update", "compute"):
            if not callable(getattr(self, name)):
                raise ValueError(f"SumMetric({name}={getattr(self, name)!r}) has to be a function")

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return self.compute(tree_map(as_sum, self.update(outputs, targets)))


def as_sum(value: Any) -> Tensor:
    """Return a sum as float64 on the CPU. Raises TypeError or ValueError if it is not a number."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise ValueError("complex numbers")
        return value.detach().to("cpu", torch.float64)
    if isinstance(value, (tuple, list)):
        raise TypeError("several numbers")
    # Python's own numbers have this precision too.
    return torch.as_tensor(value, dtype=torch.float64)


def as_number(value: Any) -> float:
    """Return a number of any form as a float.

    Raises TypeError, ValueError or RuntimeError for any other value.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return float(value) if isinstance(value, (int, float)) else as_sum(value).reshape(()).item()


def ratio(total: float, count: float) -> float:
    """Return sum / count of a pair; NaN if the count is 0, as with ignored targets alone."""
    return total / count if count else float("nan")


def has_state(metric: Any) -> bool:
    """Return whether a metric is an object with the interface of torchmetrics and torcheval."""
    return not isinstance(metric, type) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )


def check_metrics(metrics: Any) -> None:
    """Raise ValueError unless the metrics are functions under names that do not clash."""
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"Task(metrics=...) is a {type(metrics).__name__}: give a dict from names to "
            'functions, such as {"f1": f1}'
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"Task(metrics=...): the name {name!r} has to be a str")
        if isinstance(metric, type):
            raise ValueError(
                f"the metric {name!r} is the class {metric.__name__}: give an instance of it"
            )
        if not callable(metric) and not has_state(metric):
            raise ValueError(
                f"the metric {name!r} is {metric!r}, but has to be a function of outputs and "
                "targets"
            )
        _check_name(name, metrics)


def _check_name(name: str, metrics: Mapping[str, Metric]) -> None:
    # Other measurements are reported under names of the same form (`test_loss`).
    if name in ("loss", "backdoor"):
        raise ValueError(
            f"the metric {name!r} would be reported as test_{name}, which is the name of another "
            "metric: rename it"
        )
    if name.endswith("_p10") and name.removesuffix("_p10") in metrics:
        raise ValueError(
            f"the metric {name!r} has the name under which the worst tenth of "
            f"{name.removesuffix('_p10')!r} is reported: rename it"
        )
