"""Metrics of scikit-learn, torchmetrics and torcheval, used directly.

The library of a metric determines its arguments; none of these libraries needs to be installed.
Their metrics are called once, on all outputs and targets.

torchmetrics, torcheval
    Functions get (outputs, targets). Of an object with `update`, `compute` and `reset` a copy is
    reset, updated once and computed: the state of the user's own object is not changed.
scikit-learn
    Targets come first, and the name of the second argument determines the form of the outputs:
    y_pred, labels_pred   the class with the highest score, along dimension 1
    y_score, y_proba      probabilities of the classes; of two classes that of the second
    pred_decision         outputs unchanged; and so for all metrics of regression
    Scores become probabilities by softmax, unless they are probabilities already: not negative,
    with a sum of 1 for every example. Targets of -100 are left out with their scores, as in
    cross-entropy. A single score an example, of shape (n,) or (n, 1), has no highest class and may
    be a logit or a probability: only metrics of its order (y_score) accept it.

Sources: scikit-learn's user guide, "Metrics and scoring"; torchmetrics' "Implementing a Metric".
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from dure.contracts.metric import has_state

IGNORED = -100
"""torch's `ignore_index`."""

_OF_PROBABILITIES = ("log_loss", "d2_log_loss_score")
"""Functions that call probabilities y_pred, in older versions."""


def is_of_a_library(metric: Any) -> bool:
    """Return whether the metric is known to need all outputs and targets at once."""
    return has_state(metric) or _library(metric) in ("sklearn", "torchmetrics", "torcheval")


def metric_of_all(metric: Any, outputs: Any, targets: Any) -> Any:
    """Return the metric of all outputs and targets, called in the way of its library."""
    if has_state(metric):
        return _computed(metric, outputs, targets)
    if _library(metric) == "sklearn":
        return _of_sklearn(metric, outputs, targets)
    return metric(outputs, targets)


def _function(metric: Any) -> Any:
    while isinstance(metric, partial):
        metric = metric.func
    return metric


def _library(metric: Any) -> str:
    return str(getattr(_function(metric), "__module__", None) or "").partition(".")[0]


def _computed(metric: Any, outputs: Any, targets: Any) -> Any:
    own = copy.deepcopy(metric)
    if isinstance(own, nn.Module):
        own = own.cpu()
        for module in own.modules():
            # torchmetrics would gather the states of all ranks, but only this rank is here.
            module.distributed_available_fn = lambda: False  # type: ignore[assignment]
    own.reset()
    own.update(outputs, targets)
    return own.compute()


def _of_sklearn(metric: Callable[..., Any], outputs: Any, targets: Any) -> Any:
    function = _function(metric)
    first, second = [*inspect.signature(function).parameters, "", ""][:2]
    if first not in ("y_true", "labels_true", "y1"):
        raise ValueError(f"{function.__name__} does not compare predictions with targets")
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise ValueError(
            f"{function.__name__} takes tensors, and the model's outputs or the targets are more "
            "than one: call it in your own function"
        )
    if "_regression" in function.__module__ or second == "pred_decision":
        given = outputs
    elif "score" in second or "prob" in second or function.__name__ in _OF_PROBABILITIES:
        given, targets = _probabilities(outputs, targets, function.__name__, second == "y_score")
    else:
        given, targets = _classes(outputs, targets, function.__name__)
    return metric(_array(targets), _array(given))


def _classes(outputs: Tensor, targets: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if _of_classes(outputs, targets):
        scores, targets = _flat(outputs, targets)
        return scores.argmax(dim=1), targets
    if outputs.is_floating_point():
        raise ValueError(
            f"{name} takes predicted classes, and outputs of shape {list(outputs.shape)} are one "
            f"score each for targets of shape {list(targets.shape)}: convert them to classes, "
            f"such as lambda outputs, targets: {name}(targets, outputs > 0)"
        )
    return outputs, targets


def _probabilities(
    outputs: Tensor, targets: Tensor, name: str, order: bool
) -> tuple[Tensor, Tensor]:
    """Return probabilities or scores, and targets. order: only the order of scores matters."""
    if _of_classes(outputs, targets):
        scores, targets = _flat(outputs, targets)
        scores = scores.double()
        if not _are_probabilities(scores):
            scores = scores.softmax(dim=1)
        return (scores[:, 1] if scores.shape[1] == 2 else scores), targets
    if not order:
        raise ValueError(
            f"{name} takes probabilities, and outputs of shape {list(outputs.shape)} are one "
            f"score each for targets of shape {list(targets.shape)}: convert them to "
            f"probabilities, such as lambda outputs, targets: {name}(targets, outputs.sigmoid())"
        )
    # A column of scores is a score for each example.
    return _column(outputs), _column(targets)


def _are_probabilities(scores: Tensor) -> bool:
    return bool((scores >= 0).all() and ((scores.sum(dim=1) - 1).abs() < 1e-3).all())


def _of_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether scores (n, classes, ...) fit class indices of shape (n, ...)."""
    return (
        not targets.is_floating_point()
        and outputs.ndim == targets.ndim + 1
        and outputs.shape[1] > 1
        and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    )


def _flat(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (positions, classes) and (positions,), without ignored positions."""
    rows = scores.movedim(1, -1).reshape(-1, scores.shape[1])
    flat = targets.reshape(-1)
    counted = flat != IGNORED
    return rows[counted], flat[counted]


def _column(values: Tensor) -> Tensor:
    return values.squeeze(1) if values.ndim == 2 and values.shape[1] == 1 else values


def _array(values: Tensor) -> Any:
    # numpy has no bfloat16.
    short = values.is_floating_point() and values.element_size() < 4
    return (values.float() if short else values).detach().cpu().numpy()
