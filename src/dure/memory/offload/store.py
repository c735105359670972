"""Storage of offloaded tensors: files, or CPU memory for an accelerator.

Files          memory-mapped: used in place; read ahead by a thread, released behind the computation
Pinned         page-locked memory, which a device accesses directly: copied to the device to be used
Device files   files, copied to the device through page-locked memory to be used
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dure.machine.devices import is_cpu
from dure.memory.mapped import LEAST, Disk, is_on_disk
from dure.memory.offload.read_ahead import ReadAheadThread


class OffloadStore(ABC):
    """Storage of tensors. least: bytes of the smallest tensor that it accepts."""

    least: int = LEAST

    @abstractmethod
    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor in the store."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the store."""

    @abstractmethod
    def fetched(self, tensor: Tensor) -> Tensor:
        """Return a stored tensor, or a copy, on the device of the computation."""

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor should be in the store, and is not."""
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.least
            and not self.holds(tensor)
        )

    def placed(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the store."""
        own = self.empty(tensor.shape, tensor.dtype)
        # Optimizers may keep the strides of their parameters.
        own = own.as_strided(tensor.shape, tensor.stride()) if _is_dense(tensor) else own
        return own.copy_(tensor)

    def ahead(self, tensors: Iterable[Tensor], owner: Tensor | None = None) -> None:
        """Prepare tensors that are needed soon, as `ReadAheadThread.ahead`."""
        return

    def behind(self, tensors: Iterable[Tensor]) -> None:
        """Release tensors that are not needed for a while, as `ReadAheadThread.behind`."""
        return

    def close(self) -> None:
        """End background threads of the store."""
        return


class MappedFileStore(OffloadStore):
    """Mapped files in a folder on a disk. Raises DiskError if there is no disk."""

    def __init__(self, folder: str | Path | None = None, least: int = LEAST) -> None:
        self.disk = Disk(folder)
        self.least = least
        self._beside = ReadAheadThread()

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        return self.disk.zeros(shape, dtype)

    def holds(self, tensor: Tensor) -> bool:
        return is_on_disk(tensor)

    def fetched(self, tensor: Tensor) -> Tensor:
        return tensor

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and super().takes(tensor)

    def ahead(self, tensors: Iterable[Tensor], owner: Tensor | None = None) -> None:
        self._beside.ahead(tensors, owner)

    def behind(self, tensors: Iterable[Tensor]) -> None:
        self._beside.behind(tensors)

    def close(self) -> None:
        self._beside.close()


class PinnedStore(OffloadStore):
    """Page-locked CPU memory for a GPU."""

    def __init__(self, device: torch.device, least: int = LEAST) -> None:
        self.device = device
        self.least = least

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def fetched(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class DeviceFileStore(MappedFileStore):
    """Mapped files for an accelerator. Raises DiskError if there is no disk."""

    def __init__(self, device: torch.device, folder: str | Path, least: int = LEAST) -> None:
        super().__init__(folder, least)
        self.device = device

    def takes(self, tensor: Tensor) -> bool:
        return OffloadStore.takes(self, tensor)

    def fetched(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return host.to(self.device, non_blocking=True)


def store_for(device: torch.device, folder: str | Path | None = None) -> OffloadStore:
    """Return the store for a computation on a device.

    folder: of files; without one the CPU uses the first usual folder, and an accelerator the CPU's
    memory.
    """
    if is_cpu(device):
        return MappedFileStore(folder)
    return PinnedStore(device) if folder is None else DeviceFileStore(device, folder)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements have no gaps and overlaps, in any order of dimensions."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)  # type: ignore[no-any-return]
