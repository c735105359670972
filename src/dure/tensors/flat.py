"""Many tensors as one: a flat buffer and views into it.

One message is faster than many, and one vector operation faster than a loop over parameters. A
model's tensors of different dtypes are kept in one buffer a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def views_of(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of the one-dimensional `buffer`, shaped like the tensors `like`."""
    pieces: list[Tensor] = []
    start = 0
    for tensor in like:
        pieces.append(buffer[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return pieces


Kind = TypeVar("Kind", bound=Tensor)


def by_dtype(tensors: Iterable[Kind]) -> dict[torch.dtype, list[Kind]]:
    """The tensors grouped by dtype, in order of first appearance."""
    groups: dict[torch.dtype, list[Kind]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def trained_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_apart(model: nn.Module) -> None:
    """Raises ValueError for a trained parameter that has elements in common with another tensor.

    In a flat buffer it would have memory of its own, and the other would no longer follow it. One
    parameter under two names is one tensor.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        has_memory = not is_lazy(tensor) and tensor.layout is torch.strided
        if has_memory and tensor.device.type != "meta" and tensor.numel():
            found[id(tensor)] = name, tensor
    open_ones: list[tuple[str, Tensor, int]] = []
    # In order of their beginnings only those can meet that have not ended.
    for name, tensor in sorted(found.values(), key=lambda one: one[1].data_ptr()):
        begin = tensor.data_ptr()
        open_ones = [one for one in open_ones if one[2] > begin]
        for other_name, other, _ in open_ones:
            is_trained = tensor.requires_grad or other.requires_grad
            if is_trained and tensor.device == other.device and _meet(tensor, other):
                raise ValueError(
                    f"{other_name} and {name} lie in the same memory, and are two tensors: let the "
                    f"model have one parameter under both names, or clone one of them"
                )
        open_ones.append((name, tensor, begin + _span(tensor) * tensor.element_size()))


def _span(tensor: Tensor) -> int:
    """Elements from its first to its last, with the gaps in between."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an address in common, such as not two columns of one matrix."""
    addresses = []
    for tensor in (one, other):
        places = torch.arange(_span(tensor)).as_strided(tensor.shape, tensor.stride())
        addresses.append(places.reshape(-1) * tensor.element_size() + tensor.data_ptr())
    return bool(torch.isin(*addresses).any())


class Room(NamedTuple):
    """Memory for the weights of a model: flat buffers, and the parameters as views of them."""

    buffers: list[Tensor]
    views: list[list[Tensor]]


class FlatParameters:
    """A model's trained parameters in one buffer a dtype; the model goes on using them as views.

    Setting the weights, taking them, or taking a difference is then one operation on `buffers`. A
    parameter that the model uses twice is there once. Frozen parameters stay where they are.
    parameters: those of the trained ones that are to lie there; None is all.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None) -> None:
        self.buffers: list[Tensor] = []
        self.names: list[list[tuple[str, tuple[int, ...]]]] = []
        """What lies in each buffer, one after another: the parameters' names and shapes."""
        taken = trained_of(model) if parameters is None else parameters
        self._groups = list(by_dtype(taken).values())
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in self._groups:
            self.names.append([(known[id(one)], tuple(one.shape)) for one in group])
            buffer = torch.cat([parameter.detach().reshape(-1) for parameter in group])
            _put(group, views_of(buffer, group))
            self.buffers.append(buffer)

    def copy(self) -> list[Tensor]:
        """The weights as they are now, a tensor for each buffer."""
        return [buffer.clone() for buffer in self.buffers]

    def load(self, values: Sequence[Tensor]) -> None:
        """Sets the weights to `values`, which are what `copy` returned, or like it."""
        self.take_memory()
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)

    def room(self, buffers: Sequence[Tensor]) -> Room:
        """Buffers like those of the model, which then may `move` there, again and again."""
        groups = zip(buffers, self._groups, strict=True)
        return Room(list(buffers), [views_of(buffer, group) for buffer, group in groups])

    def move(self, room: Room) -> None:
        """The weights are from now on those in this room; nothing is copied."""
        self.buffers = room.buffers
        for group, views in zip(self._groups, room.views, strict=True):
            _put(group, views)

    def let_go(self) -> None:
        """The parameters need no memory until the next `load`; till then all of them are NaN.

        Whoever has taken views of them keeps those, and their memory.
        """
        for group in self._groups if self.buffers else ():
            nothing = torch.full((), math.nan, dtype=group[0].dtype, device=group[0].device)
            _put(group, [nothing.expand(parameter.shape) for parameter in group])
        self.buffers = []

    def take_memory(self) -> None:
        """Ends what `let_go` began. The weights are anything."""
        for group in () if self.buffers else self._groups:
            count = sum(parameter.numel() for parameter in group)
            buffer = torch.empty(count, dtype=group[0].dtype, device=group[0].device)
            _put(group, views_of(buffer, group))
            self.buffers.append(buffer)


def _put(parameters: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Gives the parameters their values, in the values' memory."""
    for parameter, value in zip(parameters, values, strict=True):
        # The parameter stays the same object: optimizers, hooks and modules still hold it.
        parameter.data = value
