"""Many tensors in a flat buffer, with views into the buffer.

A single message is faster than many messages, and a single vector operation is faster than a loop
over parameters. Tensors of different dtypes go into a separate buffer for each dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def views_of(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive pieces of the one-dimensional `buffer`, shaped like the tensors `like`."""
    pieces: list[Tensor] = []
    start = 0
    for tensor in like:
        pieces.append(buffer[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return pieces


Kind = TypeVar("Kind", bound=Tensor)


def by_dtype(tensors: Iterable[Kind]) -> dict[torch.dtype, list[Kind]]:
    """Return the tensors grouped by dtype, in order of first appearance."""
    groups: dict[torch.dtype, list[Kind]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def trainable_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_no_shared_memory(model: nn.Module) -> None:
    """Raise ValueError for a trainable parameter that shares elements with another tensor.

    In a flat buffer the parameter would get separate memory, and the other tensor would no longer
    follow. A parameter under two names is a single tensor.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        has_memory = not is_lazy(tensor) and tensor.layout is torch.strided
        if has_memory and tensor.device.type != "meta" and tensor.numel():
            found[id(tensor)] = name, tensor
    open_ones: list[tuple[str, Tensor, int]] = []
    # Sorted by start address, a tensor can only overlap tensors that have not ended yet.
    for name, tensor in sorted(found.values(), key=lambda one: one[1].data_ptr()):
        begin = tensor.data_ptr()
        open_ones = [one for one in open_ones if one[2] > begin]
        for other_name, other, _ in open_ones:
            is_trained = tensor.requires_grad or other.requires_grad
            if is_trained and tensor.device == other.device and _meet(tensor, other):
                raise ValueError(
                    f"{other_name} and {name} are two tensors in the same memory: use one "
                    "parameter under both names, or clone one of them"
                )
        open_ones.append((name, tensor, begin + _span(tensor) * tensor.element_size()))


def _span(tensor: Tensor) -> int:
    """Return the distance in elements from the first to the last element, gaps included, plus 1."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _meet(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an address; two columns of a matrix do not."""
    addresses = []
    for tensor in (one, other):
        places = torch.arange(_span(tensor)).as_strided(tensor.shape, tensor.stride())
        addresses.append(places.reshape(-1) * tensor.element_size() + tensor.data_ptr())
    return bool(torch.isin(*addresses).any())


class FlatBuffers(NamedTuple):
    """Memory for the weights of a model: flat buffers, and the parameters as views of them."""

    buffers: list[Tensor]
    views: list[list[Tensor]]


class FlatParameters:
    """Trainable parameters of a model in a flat buffer for each dtype; the model uses views.

    Setting the weights, copying them, or computing a difference is then a single operation on
    `buffers`. A parameter that the model uses twice is stored once. Frozen parameters stay in their
    own memory. parameters: the trainable parameters to flatten; None means all.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None) -> None:
        self.buffers: list[Tensor] = []
        self.names: list[list[tuple[str, tuple[int, ...]]]] = []
        """Names and shapes of the parameters in each buffer, in order."""
        taken = trainable_parameters(model) if parameters is None else parameters
        self._groups = list(by_dtype(taken).values())
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in self._groups:
            self.names.append([(known[id(one)], tuple(one.shape)) for one in group])
            buffer = torch.cat([parameter.detach().reshape(-1) for parameter in group])
            _put(group, views_of(buffer, group))
            self.buffers.append(buffer)

    @property
    def is_apart(self) -> bool:
        """Whether the weights are in the memory of a device, apart from the CPU's."""
        return any(not one.is_cpu for group in self._groups for one in group)

    def copy(self) -> list[Tensor]:
        """Return a copy of the current weights, a tensor for each buffer."""
        return [buffer.clone() for buffer in self.buffers]

    def load(self, values: Sequence[Tensor]) -> None:
        """Set the weights to `values`, shaped like the result of `copy`."""
        self.take_memory()
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)

    def room(self, buffers: Sequence[Tensor]) -> FlatBuffers:
        """Return buffers and their views, between which the model can `move` repeatedly."""
        groups = zip(buffers, self._groups, strict=True)
        return FlatBuffers(list(buffers), [views_of(buffer, group) for buffer, group in groups])

    def move(self, room: FlatBuffers) -> None:
        """Point the parameters at the memory of `room`, without a copy."""
        self.buffers = room.buffers
        for group, views in zip(self._groups, room.views, strict=True):
            _put(group, views)

    def release(self) -> None:
        """Release the memory of the parameters until the next `load`; every element reads as NaN.

        Views that a caller took before keep their memory.
        """
        for group in self._groups if self.buffers else ():
            nothing = torch.full((), math.nan, dtype=group[0].dtype, device=group[0].device)
            _put(group, [nothing.expand(parameter.shape) for parameter in group])
        self.buffers = []

    def take_memory(self) -> None:
        """Allocate memory again after `release`. The weights are uninitialised."""
        for group in () if self.buffers else self._groups:
            count = sum(parameter.numel() for parameter in group)
            buffer = torch.empty(count, dtype=group[0].dtype, device=group[0].device)
            _put(group, views_of(buffer, group))
            self.buffers.append(buffer)


def _put(parameters: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Point the parameters at the memory of the values."""
    for parameter, value in zip(parameters, values, strict=True):
        # The parameter object stays the same, because optimizers, hooks and modules refer to it.
        parameter.data = value
