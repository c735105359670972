"""Perturbed weights for a trial of a model.

    w <- w + 0.02 · N(0, 1)

Initial weights may hide gradients: a layer of zeros, such as the last layer of many models, passes
no gradient to the layers before it.
"""

from __future__ import annotations

import torch
from torch import nn

from dure.randomness.seeds import generator

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
