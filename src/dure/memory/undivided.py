"""The undivided model of a rank that holds a part of it: it lies in files, and the part in memory.

A model has to be whole before it can be divided: its constructor draws one parameter after another,
a trace follows the whole of it, a plan is tried beside it. None of that needs memory for the whole.

    model = in_files(make)       made, with the same draws; its large tensors lie in files
    model = unless_small(make)   the same in a process that is no rank: in memory, if that is far
                                 more than the model takes
    with beside(model): …        what is made of such a model lies in files as well: copies,
                                 gradients, the parts of its layers
    with through(model): …       a pass over it; its parameters leave memory as they were used
    bring(part)                  a rank's own part moves into memory, one tensor after another

With a model of W bytes of which a rank keeps the N-th part, the rank has

    W/N + window + the largest tensor      `dure.memory.mapped.WINDOW`, 64 MB

in memory until it trains, and W on the disk until it is divided. Nothing has to be built on a
device without data, so any constructor will do, and nothing is drawn twice. Where there is no disk
the model lies in memory, as if it were not to be divided, and the run says so (`why_not`).

Tensors of less than 1 MiB lie in memory in any case: a small model never touches the disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dure.machine.limits import rooms
from dure.machine.memory import memory_returned
from dure.memory.mapped import Disk, DiskError, is_mapped, mapped, passing, release

Made = TypeVar("Made")


_SMALL = 16
"""A model that takes less than this part of what is free is made in memory by `unless_small`.

A pipeline's proof has up to six of its size at once, and activations come on top.
"""


def in_files(make: Callable[[], Made], spared: int = 0) -> Made:
    """What `make` makes, its large tensors in files; in memory where there is no disk for them.

    spared: bytes that are made in memory before the first file.
    """
    try:
        with _on(Disk(), spared):
            return make()
    except DiskError:
        # There is none, or it is full: then memory may still do.
        return make()


def unless_small(make: Callable[[], Made]) -> Made:
    """As `in_files`, in a process that is no rank: what is small beside free memory lies in memory.

    There copies and proofs of it take half of the time.
    """
    free = min((room.nbytes for room in rooms()), default=0)
    return in_files(make, free // _SMALL)


def why_not() -> str | None:
    """Why tensors cannot lie in files here; None where they can."""
    try:
        Disk()
    except DiskError as error:
        return str(error)
    return None


def lies_in_files(model: nn.Module) -> bool:
    """Whether any tensor of a model does."""
    return any(map(is_mapped, tensors_of(model)))


def tensors_of(model: nn.Module) -> Iterable[Tensor]:
    """The parameters and buffers of a model."""
    return itertools.chain(model.parameters(), model.buffers())


def beside(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, what is made lies where the model lies: in files, or in memory."""
    return _on(Disk()) if lies_in_files(model) else nullcontext()


def through(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, what is used of a model in files leaves memory again."""
    return passing() if lies_in_files(model) else nullcontext()


@contextmanager
def aside(wanted: bool) -> Iterator[None]:
    """Inside, what is made lies in files, where that is wanted and there is a disk."""
    if not wanted or why_not() is not None:
        yield
        return
    with _on(Disk()):
        yield


@contextmanager
def _on(disk: Disk, spared: int = 0) -> Iterator[None]:
    """Inside, what is made lies there; what has moved there leaves no hole in the heap.

    spared: bytes that are made in memory before.
    """
    with memory_returned(), mapped(disk, spared=spared):
        yield


@torch.no_grad()
def bring(tensors: Iterable[Tensor]) -> None:
    """Moves those that lie in files into memory, one after another; the objects stay the same."""
    moved: dict[int, Tensor] = {}
    for tensor in tensors:
        if not is_mapped(tensor):
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # Several may lie in one storage, and do so in memory.
        if address not in moved:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            moved[address] = flat.clone()
            release([tensor])
        own = torch.empty(0, dtype=tensor.dtype)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = own.set_(moved[address].untyped_storage(), *place)
