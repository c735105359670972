"""Explain a non-finite loss by the columns of the data that have NaN or infinity."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dure.contracts.task import Task
from dure.data.bad_values import bad_values
from dure.errors import LossNotFiniteError
from dure.protocol.messages import NOT_FINITE


@contextmanager
def bad_values_named(task: Task) -> Iterator[None]:
    """Context manager: add the columns with NaN or infinity to a `LossNotFiniteError`.

    The data are searched only after the error, because a model may well replace missing values.
    """
    try:
        yield
    except LossNotFiniteError as error:
        error.bad_values = bad_values(task.train, task.features) or ""
        raise


def warn_of_bad_values(task: Task, summary: Mapping[str, Any]) -> None:
    """Warn of columns with NaN or infinity if a simulation rejected updates as not finite."""
    facts: Mapping[str, Any] = next(iter(summary.get("facts", ())), {})
    if NOT_FINITE.isdisjoint(facts.get("refusals", ())):
        return
    found = bad_values(task.train, task.features)
    if found is not None:
        warnings.warn(f"the training data contain invalid values: {found}", stacklevel=6)
