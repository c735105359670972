"""A model with other weights, for a trial: those that it begins with may hide gradients."""

from __future__ import annotations

import torch
from torch import nn

from dure.randomness.seeds import generator

MOVED = 0.02
"""How far the weights are moved, in deviations of a normal number."""


@torch.no_grad()
def moved(model: nn.Module, purpose: str) -> nn.Module:
    """Return the model, whose weights have been moved: by the same on every rank and in every copy.

    A layer of zeros, such as the last one of many models, passes no gradient on to those before it.
    """
    draws = generator(0, purpose)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
            parameter.add_(noise.to(parameter.device), alpha=MOVED)
    return model
