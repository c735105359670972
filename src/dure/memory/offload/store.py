"""Where offloaded tensors lie: in files, or in the CPU's memory where a GPU computes.

Files    mapped: computed with where they lie; read ahead by a thread, let go behind the computation
Pinned   memory that a GPU copies from and to by itself: computed with as a copy on the GPU
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dure.memory.mapped import LEAST, Disk, in_own_file
from dure.memory.offload.beside import Beside


class Store(ABC):
    """A place for tensors. least: bytes of the smallest that it takes."""

    least: int = LEAST

    @abstractmethod
    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A tensor that lies there."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies there."""

    @abstractmethod
    def fetched(self, tensor: Tensor) -> Tensor:
        """A tensor that lies there, where it can be computed with: itself, or a copy."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor should lie there, and does not."""
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.least
            and not self.holds(tensor)
        )

    def placed(self, tensor: Tensor) -> Tensor:
        """The values of a tensor, there."""
        own = self.empty(tensor.shape, tensor.dtype)
        # Optimizers may keep the strides of their parameters.
        own = own.as_strided(tensor.shape, tensor.stride()) if _is_dense(tensor) else own
        return own.copy_(tensor)

    def ahead(self, tensors: Iterable[Tensor], owner: Tensor | None = None) -> None:
        """They will be needed soon; as `Beside.ahead`."""
        return

    def behind(self, tensors: Iterable[Tensor]) -> None:
        """They will not be needed for a while; as `Beside.behind`."""
        return

    def close(self) -> None:
        """Ends what works beside the computation."""
        return


class Files(Store):
    """Mapped files in a folder on a disk. Raises DiskError where there is none."""

    def __init__(self, folder: str | Path | None = None, least: int = LEAST) -> None:
        self.disk = Disk(folder)
        self.least = least
        self._beside = Beside()

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        return self.disk.empty(shape, dtype)

    def holds(self, tensor: Tensor) -> bool:
        return in_own_file(tensor)

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


class Pinned(Store):
    """The CPU's memory, next to a GPU."""

    def __init__(self, device: torch.device, least: int = LEAST) -> None:
        self.device = device
        self.least = least

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def fetched(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def store_for(device: torch.device, folder: str | Path | None = None) -> Store:
    """The store for what is computed on a device."""
    return Files(folder) if device.type == "cpu" else Pinned(device)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie without gaps and overlaps, in any order of dimensions."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)  # type: ignore[no-any-return]
