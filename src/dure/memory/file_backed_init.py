"""File-backed construction of the whole model on a rank that trains a part of it.

A model has to be whole before it can be divided: its constructor draws parameters in
turn, a trace follows all of it, a plan is tested against it. With mapped files none of these
steps needs memory for the whole model.

    model = in_files(make)       created with the same draws; its large tensors are in files
    model = unless_small(make)   the same in a process that is no rank: in memory, if the model is
                                 much smaller than free memory
    with in_files_like(model):   tensors created from such a model are in files as well: copies,
                                 gradients, the parts of its layers
    with releasing_pass(model):  a pass over it; its parameters leave memory after use
    move_to_memory(part)         a rank's own part moves to memory, tensor by tensor

With a model of W bytes of which a rank has the N-th part, the rank has

    W/N + window + the largest tensor      `dure.memory.mapped.WINDOW`, 64 MB

in memory before training, and W on the disk until the division. The model need not be constructed
on a device without data, so any constructor works, and nothing is drawn twice. Without a disk the
model is in memory, as if it were not divided, and the run reports the reason (`why_not`).

Tensors of less than 1 MiB are in memory in any case: a small model never uses the disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dure.machine.limits import remaining_memory
from dure.machine.memory import return_freed_memory
from dure.memory.mapped import (
    Disk,
    DiskError,
    is_mapped,
    mapped,
    release_pages,
    releasing_used_pages,
)

Made = TypeVar("Made")


_SMALL = 16
"""Divisor of free memory: `unless_small` creates smaller models in memory.
A pipeline's proof needs up to six times its size at once, and activations in addition.
"""


def in_files(make: Callable[[], Made], memory_budget: int = 0) -> Made:
    """Return the result of `make`, with large tensors in files; in memory if there is no disk.

    memory_budget: as in `mapped`.
    """
    try:
        with _on(Disk(), memory_budget):
            return make()
    except DiskError:
        # There is no disk, or it is full: memory may still suffice.
        return make()


def unless_small(make: Callable[[], Made]) -> Made:
    """Return `in_files(make)` in a process that is no rank, but keep small models in memory.

    In memory, copies and proofs of the model take half of the time.
    """
    free = min((room.nbytes for room in remaining_memory()), default=0)
    return in_files(make, free // _SMALL)


def why_not() -> str | None:
    """Return the reason why tensors cannot be in files here; None if they can."""
    try:
        Disk()
    except DiskError as error:
        return str(error)
    return None


def lies_in_files(model: nn.Module) -> bool:
    """Return whether any tensor of a model is in a file."""
    return any(map(is_mapped, tensors_of(model)))


def tensors_of(model: nn.Module) -> Iterable[Tensor]:
    """Return the parameters and buffers of a model."""
    return itertools.chain(model.parameters(), model.buffers())


def in_files_like(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which new tensors are in files if the model is, otherwise in memory."""
    return _on(Disk()) if lies_in_files(model) else nullcontext()


def releasing_pass(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which used tensors of a model in files leave memory again."""
    return releasing_used_pages() if lies_in_files(model) else nullcontext()


@contextmanager
def in_files_if(wanted: bool) -> Iterator[None]:
    """Context manager in which tensors are created in files, if `wanted` and if there is a disk."""
    if not wanted or why_not() is not None:
        yield
        return
    with _on(Disk()):
        yield


@contextmanager
def _on(disk: Disk, memory_budget: int = 0) -> Iterator[None]:
    """Context manager in which tensors are created on a disk, and freed heap memory is returned.

    memory_budget: as in `mapped`.
    """
    with return_freed_memory(), mapped(disk, memory_budget=memory_budget):
        yield


@torch.no_grad()
def move_to_memory(tensors: Iterable[Tensor]) -> None:
    """Move tensors from files to memory, tensor by tensor; the tensor objects stay the same."""
    moved: dict[int, Tensor] = {}
    for tensor in tensors:
        if not is_mapped(tensor):
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # Several tensors may share a storage, and continue to share it in memory.
        if address not in moved:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            moved[address] = flat.clone()
            release_pages([tensor])
        own = torch.empty(0, dtype=tensor.dtype)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = own.set_(moved[address].untyped_storage(), *place)
