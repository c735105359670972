"""A model in training or evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside, the model is in this mode. After it, each of its modules is in its own again.

    A module that somebody has set to evaluation inside a model that trains, such as a batch norm
    that is frozen, stays there.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        # Not by `train`, which tells all modules below, and may be the user's own.
        for module, mode in before:
            module.training = mode
