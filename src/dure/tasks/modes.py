"""Temporary training or evaluation mode of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Context manager: set the model's mode, and restore each module's own mode afterwards.

    A module in evaluation mode inside a model that trains, such as a frozen batch norm, returns to
    evaluation.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        # Not by `train`, which changes all submodules, and may be overridden by the user.
        for module, mode in before:
            module.training = mode
