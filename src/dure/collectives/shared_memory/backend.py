"""The torch.distributed backend `dure`: a process group of CPU tensors over shared memory.

Within a host everything goes through `Host`; between hosts through gloo underneath (`across`). Collectives run in
the order of their issue: on the caller's thread when nothing is under way, else on the group's own. Sends and
receives do not wait for collectives, nor these for them.
"""

# mypy: disable-error-code="override, assignment"
# torch's stubs list conveniences for single tensors beside what c10d itself calls, which is what is here.

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from dure.collectives.shared_memory.across import Across
from dure.collectives.shared_memory.calls import (
    AVG,
    NUMBER_OF,
    SUM,
    check_reducible,
    check_tensor,
)
from dure.collectives.shared_memory.host import Collectives
from dure.collectives.shared_memory.mailbox import Mailbox
from dure.collectives.shared_memory.meeting import Core, meet
from dure.collectives.shared_memory.work import Line

_groups: weakref.WeakSet[SharedMemoryGroup] = weakref.WeakSet()


@dataclass(frozen=True)
class Options:
    """What can be chosen for a group: pass it as `pg_options`.

    core: "c" is the compiled core; "torch" does without; "auto" is C if it was built. A host uses C only if all of
    its ranks do.
    """

    core: Core = "auto"


def create(backend_options: Any, options: Options | None = None) -> SharedMemoryGroup:
    """What torch.distributed calls to make a group; collective over its ranks."""
    size = backend_options.group_size
    names = list(backend_options.global_ranks_in_group) or list(range(size))
    return SharedMemoryGroup(
        backend_options.store,
        backend_options.group_rank,
        size,
        backend_options.timeout,
        names,
        options if isinstance(options, Options) else Options(),
    )


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group of the backend `dure`. Users get it from init_process_group and new_group.

    Beside what every process group has: `all_reduce`, the shortest way to a sum, and `monitored_barrier`.
    Every call checks that all ranks have called the same, raises MismatchError on all ranks if not, and goes on
    working. A rank that dies, leaves, or does not come within the group's time-out raises PeerLostError on all
    others, which ends the group.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int], options: Options
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._names = tuple(names)
        self._store = store
        self._process = os.getpid()
        self._group_name, self._description = "", ""
        self.hosts, self._host = meet(store, rank, names, timeout.total_seconds(), options.core)
        self._across = Across(store, rank, self.hosts, self._host, names) if len(self.hosts) > 1 else None
        self._ranks: Collectives = self._across or self._host
        self._line = Line(f"dure group of {size}")
        self._mailbox = Mailbox(self._host, NUMBER_OF)
        self._here = next(host for host in self.hosts if rank in host)
        for name in ("all_reduce", "reduce_scatter", "exchange"):
            setattr(self._ranks, name, _destroyed)
        self._reduce = _destroyed
        if self._mailbox.close() and ended:  # else a thread still uses what would go
            self._host.close()


def _destroyed(*_: Any) -> None:
    raise RuntimeError("this process group was destroyed: make a new one")


@atexit.register
def leave_all() -> None:
    """A process that ends without destroying its groups leaves them, so that no peer waits for it."""
    for group in list(_groups):
        with contextlib.suppress(Exception):
            if not group._closed and os.getpid() == group._process:
                group._host.leave()


def _single(values: list[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"a rank has one device here and so gives one tensor, not {len(values)}")
    return values[0]


def _reducible(tensor: Tensor, op: int) -> Tensor:
    check_tensor(tensor)
    if tensor.is_complex() and op in (SUM, AVG):
        tensor = torch.view_as_real(tensor)
    check_reducible(tensor.dtype, op)
    return tensor


def _unequal(sizes: Sequence[int]) -> int:
    """A hash of sizes that are not all the same, which all ranks must agree on; else 0."""
    return 1 + zlib.crc32(repr(tuple(sizes)).encode()) if len(set(sizes)) > 1 else 0


def _dense_like(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else room for its values."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _copy_back(dense: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(dense, targets, strict=True):
        if source is not target:
            target.copy_(source)


def _offers(parts: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where each part lies in the bytes of all of them, one after another."""
    offers, offset = [], 0
    for part in parts:
        offers.append((offset, part.nbytes))
        offset += part.nbytes
    return offers


def _split(tensor: Tensor, splits: list[int], size: int) -> list[Tensor]:
    if splits:
        return list(torch.split(tensor, splits))
    return list(tensor.tensor_split(size)) if tensor.dim() else [tensor] * size
