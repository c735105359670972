"""Buffers of a model that travel with its weights: the buffers that exist at the start.

A forward pass may replace the tensor of a buffer, so buffers are identified by name. A buffer that
is None at the start and is created in a forward pass, such as the mask or the angles of an
attention, stays local to its replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn


class BufferNames:
    """Names of a model's buffers, in the model's order, at the time of construction."""

    def __init__(self, model: nn.Module) -> None:
        self.names = tuple(name for name, _ in model.named_buffers())

    def __len__(self) -> int:
        return len(self.names)

    def of(self, model: nn.Module) -> list[Tensor]:
        """Return the buffers of `model`, which is the same model or a model with equal names.

        Raises ValueError if `model` lacks a buffer.
        """
        # All names: a forward pass may have put one tensor in the place of two.
        found = dict(model.named_buffers(remove_duplicate=False)) if self.names else {}
        missing = next((name for name in self.names if name not in found), None)
        if missing is not None:
            raise ValueError(
                f"the buffer {missing} existed at the start and was removed: set it to zeros, not "
                "None"
            )
        return [found[name] for name in self.names]

    @torch.no_grad()
    def load(self, model: nn.Module, values: Sequence[Tensor]) -> None:
        """Copy the values into the buffers of `model`."""
        for buffer, value in zip(self.of(model), values, strict=True):
            write(buffer, value)


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], elsewhere: Sequence[str] = ()
) -> None:
    """Load weights like `load_state_dict`, including buffers that are still None in `model`.

    A parameter without memory (device="meta"), such as a table of a parameter server, gets memory.
    elsewhere: names of tensors that other processes hold; they become meta tensors here, which have
    a shape and no values.
    """
    devices = (one.device for one in model.parameters() if not one.is_meta)
    device = next(devices, torch.device("cpu"))
    modules = dict(model.named_modules())
    for name, value in weights.items():
        # Path of the module that owns the tensor, and the tensor's name in the module.
        place, _, own = name.rpartition(".")
        buffers = modules[place]._buffers if place in modules else {}
        # load_state_dict reports a buffer that is None in the model as an unexpected key.
        if own in buffers and buffers[own] is None:
            buffers[own] = value.to(device, copy=True)
        parameter = modules[place]._parameters.get(own) if place in modules else None
        if parameter is not None and parameter.is_meta:
            memory = torch.empty_like(parameter, device=device)
            trained = parameter.requires_grad
            modules[place]._parameters[own] = nn.Parameter(memory, requires_grad=trained)
    kept = {name: value for name, value in model.state_dict().items() if name in elsewhere}
    model.load_state_dict({**kept, **weights})
    for name in kept:
        place, _, own = name.rpartition(".")
        _empty(modules[place], own)


def _empty(module: nn.Module, name: str) -> None:
    """Replace a tensor of the module by a meta tensor of the same shape."""
    parameter = module._parameters.get(name)
    if parameter is not None:
        module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        return
    buffer = module._buffers[name]
    assert buffer is not None
    module._buffers[name] = buffer.to("meta")


def write(target: Tensor, value: Tensor) -> None:
    """Copy the value into the target if the two differ."""
    # An expanded tensor cannot be written; it never changes either.
    if target.device != value.device or not torch.equal(target, value):
        target.copy_(value)


def common_buffers(one: nn.Module, other: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Return pairs of the buffers that both models have, matched by name."""
    theirs = dict(other.named_buffers())
    return ((buffer, theirs[name]) for name, buffer in one.named_buffers() if name in theirs)


@torch.no_grad()
def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Copy the source's buffers into the target's buffers of the same names."""
    for theirs, mine in common_buffers(source, target):
        write(mine, theirs)


def non_persistent_buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state_dict leaves out (`persistent=False`), by name."""
    # keep_vars: only the names are wanted, so nothing is detached for them.
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


@torch.no_grad()
def load_non_persistent_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values into the non-persistent buffers: the inverse of `non_persistent_buffers_of`."""
    for name, buffer in non_persistent_buffers_of(model).items():
        if name in values:
            write(buffer, values[name])
