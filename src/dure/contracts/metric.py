"""What a metric is: a number over all test examples, wherever they are computed.

    sums      update(outputs, targets) of a batch; added over batches and ranks, finished once
    function  metric(outputs, targets), called once, on all outputs and targets

Sums need no memory, and can do more than means: a confusion matrix has F1 in it, a histogram of
scores AUC. A function is simpler; what it is given has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Metric = Callable[[Any, Any], Any]
"""metric(outputs, targets) gives a number, or a pair (sum, count).

Pairs are added over batches, and divided once: a pair is the `SumMetric` of a mean. A function that
gives a number is called once, on all outputs and targets. Functions of scikit-learn, and functions
and objects of torchmetrics and torcheval, are such functions too (`dure.tasks.libraries`).
"""


@dataclass(frozen=True)
class SumMetric:
    """A metric of sums of any shape.

    update: update(outputs, targets) gives what a batch adds: a tensor, or a tuple, list or dict of
        tensors and numbers, of the same shapes for every batch. Outputs and targets are where the
        model is.
    compute: compute(sums) makes the number of the sums over all batches, which have the structure
        and the shapes that `update` gives, as float64 on the CPU. Called once.

    Called itself, it is the metric of one batch.
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
    """A sum as float64 on the CPU. Raises TypeError or ValueError if it is no number."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise ValueError("complex numbers")
        return value.detach().to("cpu", torch.float64)
    if isinstance(value, (tuple, list)):
        raise TypeError("several numbers")
    # Python's own numbers have this precision too.
    return torch.as_tensor(value, dtype=torch.float64)


def as_number(value: Any) -> float:
    """One number, in whatever form. Raises TypeError, ValueError or RuntimeError if it is none."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return float(value) if isinstance(value, (int, float)) else as_sum(value).reshape(()).item()


def ratio(total: float, count: float) -> float:
    """What a pair gives. NaN where there was nothing to count, such as ignored targets alone."""
    return total / count if count else float("nan")


def has_state(metric: Any) -> bool:
    """Whether it is an object with the face of torchmetrics' and torcheval's metrics."""
    return not isinstance(metric, type) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )


def check_metrics(metrics: Any) -> None:
    """Raises ValueError unless they are functions by names that do not clash."""
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"Task(metrics=...) is a {type(metrics).__name__}: give names to functions, such as "
            f'{{"f1": f1}}'
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"Task(metrics=...): the name {name!r} has to be a text")
        if isinstance(metric, type):
            raise ValueError(
                f"the metric {name!r} is the class {metric.__name__}: give an object of it"
            )
        if not callable(metric) and not has_state(metric):
            raise ValueError(
                f"the metric {name!r} has to be a function of outputs and targets, and is "
                f"{metric!r}"
            )
        _check_name(name, metrics)


def _check_name(name: str, metrics: Mapping[str, Metric]) -> None:
    # What is measured besides metrics is reported by the same names (`test_loss`).
    if name in ("loss", "backdoor"):
        raise ValueError(
            f"the metric {name!r} would be reported as test_{name}, which is another number: call "
            f"it otherwise"
        )
    if name.endswith("_p10") and name.removesuffix("_p10") in metrics:
        raise ValueError(
            f"the metric {name!r} has the name of the worst tenth of "
            f"{name.removesuffix('_p10')!r}: call it otherwise"
        )
