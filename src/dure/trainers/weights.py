"""Weights and buffers of a trainer's model, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dure.tensors.buffers import write


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights and buffers into a model; its tensors stay the same objects.

    Raises ValueError for a name that the model does not have, and for another shape.
    """
    there = _named(model)
    for name, value in tensors.items():
        own = there.get(name)
        if own is None or own.shape != value.shape:
            has = "none of this name" if own is None else f"the shape {list(own.shape)}"
            raise ValueError(
                f"{name} has the shape {list(value.shape)}, but the trainer's model has {has}"
            )
        write(own, value.to(own.device, own.dtype))


@torch.no_grad()
def copy_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of weights and buffers, in the CPU's memory."""
    there = _named(model)
    return {name: there[name].detach().to("cpu", copy=True) for name in names}


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
