"""Stand-in for NCCL: a torch.distributed backend "acccl" for tensors of the device "acc".

It reaches the device's memory itself, so that nothing is copied to the host, and refuses tensors of
the CPU. Its transfers are those of dure's shared memory. `import stand_in_backend` registers it as
the device's default backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import stand_in_device
from dure.collectives.shared_memory.backend import SharedMemoryGroup, create
from dure.collectives.shared_memory.device_backend import DeviceBackend

NAME = "acccl"


class DeviceGroup(dist.ProcessGroup):
    """Process group for tensors of the device, over a group of shared memory."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.inner = create(options)

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


dist.Backend.register_backend(NAME, make, extended_api=True, devices=[stand_in_device.NAME])
