"""Tensors of a model that nothing can be written into, made such that weights can be loaded.

A buffer may show one element in several places (`expand`), be made under `torch.inference_mode`, or
lie in a file that is mapped for reading only. A loop that only reads it trains. But weights are
also loaded: into the model that the user gets, into a client's, on resuming. So such a tensor gets
memory of its own, with the same values. What is trained, or lies where another tensor of the model
lies, cannot have a copy in its place, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dure.tensors.overlap import end_of, overlap, overlaps_itself

_MAPS = Path("/proc/self/maps")
"""What memory the process has, and what it may do there; Linux alone has it."""


def make_writable(model: nn.Module) -> None:
    """Gives each tensor of the model that cannot be written memory of its own, in place.

    Raises ValueError where one is trained, or shares elements with another tensor of the model.
    """
    found = [(name, one) for name, one in _tensors_of(model) if _is_plain(one)]
    maps = _Maps()
    reasons = {id(one): _why_not(one, maps) for _, one in found}
    copies: dict[int, Tensor] = {}
    for name, tensor in found:
        reason = reasons[id(tensor)]
        if reason is None or id(tensor) in copies:
            continue
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            raise ValueError(
                f"the parameter {name} cannot be trained, for {reason}: make it of a clone()"
            )
        for other_name, other in found:
            if other is not tensor and overlap(tensor, other):
                raise ValueError(
                    f"the model's {name} cannot be loaded, for {reason}, and lies where "
                    f"{other_name} lies: compute it in the forward pass, or clone() it"
                )
        copies[id(tensor)] = _copy_of(tensor)
    if copies:
        _put(model, copies)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has elements in memory that can be looked at."""
    return (
        not is_lazy(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not tensor.is_quantized
    )


def _why_not(tensor: Tensor, maps: _Maps) -> str | None:
    """Why nothing can be written into a tensor; None where it can."""
    if tensor.is_inference():
        return "it was made under torch.inference_mode"
    if overlaps_itself(tensor):
        return "it shows one element in several places, as expand() makes it"
    if maps.forbid(tensor):
        return "it lies in memory that can only be read, such as a mapped file"
    return None


class _Maps:
    """What memory of the process can only be read."""

    @cached_property
    def read_only(self) -> list[tuple[int, int]]:
        """Where it begins and ends; read once, for there may be many lines and many tensors."""
        found = []
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
            addresses, rights, *_ = line.split()
            if "w" not in rights:
                first, last = (int(address, 16) for address in addresses.split("-"))
                found.append((first, last))
        return found

    def forbid(self, tensor: Tensor) -> bool:
        """Whether nothing can be written where a tensor lies."""
        # Memory that torch has allocated itself can be resized, and written.
        if tensor.untyped_storage().resizable():
            return False
        begin = tensor.data_ptr()
        end = end_of(tensor)
        return any(first < end and begin < last for first, last in self.read_only)


def _copy_of(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def _put(model: nn.Module, copies: dict[int, Tensor]) -> None:
    """Puts the copies in the tensors' places: under all names, where one has several."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) in copies:
                    held[name] = copies[id(tensor)]  # type: ignore[assignment]
