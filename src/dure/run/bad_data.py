"""A loss that is not finite, and the columns of the data that make it so."""

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
    """Name the columns with NaN or infinity where the loss is not finite.

    Only then are the data looked through: a model may well replace what is missing.
    """
    try:
        yield
    except LossNotFiniteError as error:
        error.bad_values = bad_values(task.train, task.features) or ""
        raise


def warn_of_bad_values(task: Task, summary: Mapping[str, Any]) -> None:
    """Warn of columns with NaN or infinity where clients of a simulation were refused for them."""
    facts: Mapping[str, Any] = next(iter(summary.get("facts", ())), {})
    if NOT_FINITE.isdisjoint(facts.get("refusals", ())):
        return
    found = bad_values(task.train, task.features)
    if found is not None:
        warnings.warn(f"the training data have bad values: {found}", stacklevel=6)
