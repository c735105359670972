"""Replace read-only tensors of a model by copies, so that weights can be loaded.

A buffer may show an element in several places (`expand`), be created under `torch.inference_mode`,
or be mapped read-only from a file. A training loop that only reads the buffer works. But weights
are also loaded: into the model that the user gets, into a client's model, and on resuming. So each
read-only tensor gets separate memory with the same values. A trainable tensor, or a tensor that
shares memory with another tensor of the model, cannot be replaced by a copy, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dure.tensors.overlap import end_address, overlap, overlaps_itself

_MAPS = Path("/proc/self/maps")
"""Memory maps of the process with their permissions; Linux only."""


def make_writable(model: nn.Module) -> None:
    """Replace each read-only tensor of the model by a writable copy, in place.

    Raises ValueError if such a tensor is trainable or shares elements with another tensor.
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
                f"the parameter {name} cannot be trained, because {reason}: create it from a "
                "clone()"
            )
        for other_name, other in found:
            if other is not tensor and overlap(tensor, other):
                raise ValueError(
                    f"the model's {name} cannot be loaded, because {reason}, and it shares memory "
                    f"with {other_name}: compute it in the forward pass, or clone() it"
                )
        copies[id(tensor)] = _copy_of(tensor)
    if copies:
        _put(model, copies)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has elements in memory that can be inspected."""
    return (
        not is_lazy(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not tensor.is_quantized
    )


def _why_not(tensor: Tensor, maps: _Maps) -> str | None:
    """Return the reason why a tensor is read-only, or None if the tensor is writable."""
    if tensor.is_inference():
        return "it was made under torch.inference_mode"
    if overlaps_itself(tensor):
        return "several of its elements share memory, as after expand()"
    if maps.forbid(tensor):
        return "it is in read-only memory, such as a mapped file"
    return None


class _Maps:
    """Read-only memory of the process."""

    @cached_property
    def read_only(self) -> list[tuple[int, int]]:
        """Start and end addresses; read once, because lines and tensors may be many."""
        found = []
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
            addresses, rights, *_ = line.split()
            if "w" not in rights:
                first, last = (int(address, 16) for address in addresses.split("-"))
                found.append((first, last))
        return found

    def forbid(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor is read-only."""
        # Memory that torch has allocated itself can be resized, and written.
        if tensor.untyped_storage().resizable():
            return False
        begin = tensor.data_ptr()
        end = end_address(tensor)
        return any(first < end and begin < last for first, last in self.read_only)


def _copy_of(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def _put(model: nn.Module, copies: dict[int, Tensor]) -> None:
    """Put the copies in the tensors' places, under all names of a tensor."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) in copies:
                    held[name] = copies[id(tensor)]  # type: ignore[assignment]
