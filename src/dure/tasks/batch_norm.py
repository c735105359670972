"""Batch norm in training: a batch needs two values a channel, so one example may be too few."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dure.data.examples import Examples
from dure.machine.compiler import left_out
from dure.machine.devices import to_device


@torch.no_grad()
def needs_two(model: nn.Module, examples: Examples) -> bool:
    """Whether the model cannot train on one example alone.

    It has a batch norm that sees a single value a channel then. The model stays as it is. Cost: for
    models with batch norm, a forward pass of one example in evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    # A model may keep some of them as they are in evaluation.
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and _measures(one)]
    lone: list[nn.Module] = []

    def look(module: nn.Module, given: Any) -> None:
        (values,) = given
        if values.numel() == values.shape[1]:
            lone.append(module)

    hooks = [one.register_forward_pre_hook(look) for one in norms]
    try:
        model.eval()
        # What else is wrong with the model or the example is said by its first step.
        with suppress(Exception), left_out():
            if norms:
                device = next(model.parameters()).device
                inputs, _ = to_device(examples.batch(torch.tensor([0])), device)
                model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return bool(lone)


def _measures(norm: _BatchNorm) -> bool:
    """Whether it takes the statistics of the batch."""
    return norm.training or norm.running_mean is None
