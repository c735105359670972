"""Stand-in for NCCL: a torch.distributed backend "acccl" for tensors of the device "acc".

It reaches the device's memory itself, so that nothing is copied to the host, and refuses tensors of
the CPU. As NCCL does, a group executes its messages in the order of their issue, and a send lasts
until its receiver has come: ranks that wait for each other in a circle are found. The bytes go
through dure's shared memory. `import stand_in_backend` registers it as the device's default
backend.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import stand_in_device
from dure.collectives.shared_memory.backend import SharedMemoryGroup, create
from dure.collectives.shared_memory.device_backend import DeviceBackend

NAME = "acccl"


class Message:
    """Message in progress."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        self.future.result()
        return True

    def is_completed(self) -> bool:
        return self.future.done()


class DeviceGroup(dist.ProcessGroup):
    """Process group for tensors of the device, over a group of shared memory."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.inner = create(options)
        self.store = dist.PrefixStore(f"acccl {options.group_id}", options.store)
        self.rank_here = options.group_rank
        self.counts: dict[tuple[int, int], int] = {}
        self.stream: ThreadPoolExecutor | None = None
        """Messages, one after another."""

    def issue(self, messages: list[tuple[bool, torch.Tensor, int]]) -> Message:
        """Issue messages that may run at once: (whether it is sent, tensor, rank of the peer)."""
        moves: list[tuple[bool, torch.Tensor, int, str]] = []
        for sends, tensor, peer in messages:
            pair = (self.rank_here, peer) if sends else (peer, self.rank_here)
            number = self.counts[pair] = self.counts.get(pair, 0) + 1
            moves.append((sends, _reached(tensor), peer, f"{pair[0]} {pair[1]} {number}"))

        def meet() -> None:
            for sends, _, _, key in moves:
                if not sends:
                    self.store.set(key, "")
            for sends, _, _, key in moves:
                if sends:
                    self.store.wait([key])
            works = [
                (self.inner.send if sends else self.inner.recv)([host], peer)
                for sends, host, peer, _ in moves
            ]
            for work in works:
                work.wait()
            messages.clear()  # their memory may be freed only now

        if self.stream is None:
            self.stream = ThreadPoolExecutor(1)
        return Message(self.stream.submit(meet))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Message:
        return self.issue([(True, tensors[0], to)])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Message:
        return self.issue([(False, tensors[0], source)])

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(stand_in_device.NAME)]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    group_name = property(lambda self: self.inner.group_name)
    group_desc = property(lambda self: self.inner.group_desc)
    options = property(lambda self: self.inner.options)
    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False


def _reached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.device.type != stand_in_device.NAME:
        raise RuntimeError(f"No backend type associated with device type {leaf.device.type}")
    return stand_in_device.core.alias(leaf)


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: DeviceGroup, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_reached, (args, kwargs))
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for kind in (DeviceBackend, SharedMemoryGroup):
    for name, value in vars(kind).items():
        own = name in vars(DeviceGroup) or name.startswith("__")
        if callable(value) and not own:
            setattr(DeviceGroup, name, _delegated(name))


def make(options: Any, _: Any = None) -> DeviceGroup:
    """Make a group: called by torch.distributed."""
    return DeviceGroup(options)


_batch_isend_irecv = dist.batch_isend_irecv


def batch_isend_irecv(operations: list[dist.P2POp]) -> Any:
    """Issue a batch together, as torch does on NCCL."""
    group = operations[0].group
    if not isinstance(group, DeviceGroup):
        return _batch_isend_irecv(operations)
    ranks = dist.get_process_group_ranks(group)
    return [
        group.issue(
            [(one.op is dist.isend, one.tensor, ranks.index(one.peer)) for one in operations]
        )
    ]


dist.batch_isend_irecv = batch_isend_irecv
dist.Backend.register_backend(NAME, make, extended_api=True, devices=[stand_in_device.NAME])
