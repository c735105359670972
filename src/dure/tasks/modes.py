"""Temporary states of a model: training or evaluation mode, and perturbed weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dure.randomness.seeds import generator


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


DEVIATION = 0.02
"""Standard deviation of the perturbation."""


@torch.no_grad()
def perturbed(model: nn.Module, purpose: str) -> nn.Module:
    """Return the model after adding noise to its weights: the same on every rank, for every copy.

    purpose: names the stream of random numbers.
    """
    draws = generator(0, purpose)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
            parameter.add_(noise.to(parameter.device), alpha=DEVIATION)
    return model
