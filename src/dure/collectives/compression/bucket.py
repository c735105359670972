"""Bucket: tensors that are compressed together, as a vector of their elements.

Half-precision numbers are processed in float32, all others in their own precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.collectives.arguments import check_writable
from dure.tensors.flat import views_of


class CompressionBucket:
    """Shapes, dtype and device of tensors that are compressed together.

    shapes: shape of each tensor. dtype: dtype of all. work: dtype of computations. n: total
    elements. Raises ValueError unless the tensors are dense, of the same floating-point dtype and
    on the same device.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        if not like:
            raise ValueError("a bucket needs at least one tensor")
        self.shapes = [tensor.shape for tensor in like]
        self.dtype = like[0].dtype
        self.device = like[0].device
        for tensor in like:
            check_writable(tensor)
            if not tensor.dtype.is_floating_point:
                raise ValueError(f"only floating-point numbers are compressed, not {tensor.dtype}")
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise ValueError(
                    f"a bucket has one dtype and device, not {self.dtype} on {self.device} and "
                    f"{tensor.dtype} on "
                    f"{tensor.device}: make a compressor for each (dure.tensors.flat.by_dtype)"
                )
        self.work = torch.float32 if self.dtype.itemsize < 4 else self.dtype
        self.lengths = [shape.numel() for shape in self.shapes]
        self.n = sum(self.lengths)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError unless these tensors match the bucket's."""
        if [tensor.shape for tensor in tensors] != self.shapes:
            raise ValueError(
                f"the compressor was made for shapes {list(map(tuple, self.shapes))}, "
                f"not {[tuple(tensor.shape) for tensor in tensors]}"
            )
        for tensor in tensors:
            check_writable(tensor)
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise ValueError(
                    f"the compressor was made for {self.dtype} on {self.device}, not "
                    f"{tensor.dtype} on {tensor.device}"
                )

    def zeros(self) -> Tensor:
        """Return a vector of zeros, of shape (n,) and the work dtype."""
        return torch.zeros(self.n, dtype=self.work, device=self.device)

    def vector(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all elements, of shape (n,), in the work dtype.

        A view if the tensors are consecutive in memory and have that dtype, else a copy.
        """
        whole = one_piece(tensors) if self.work == self.dtype else None
        return (
            whole
            if whole is not None
            else torch.cat([tensor.detach().reshape(-1).to(self.work) for tensor in tensors])
        )

    def tensors(self, vector: Tensor) -> list[Tensor]:
        """Return the vector as tensors of the bucket's shapes and dtype, as views if possible."""
        pieces = torch.split(vector, self.lengths)
        return [
            piece.to(self.dtype).view(shape)
            for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def give_back(self, vector: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the vector's elements into the tensors, unless the vector is a view of them."""
        # `vector` is a view of the tensors (`one_piece`).
        if vector.data_ptr() == tensors[0].data_ptr() and vector.dtype == self.dtype:
            return
        whole = one_piece(tensors)
        if whole is not None:
            whole.copy_(vector)
            return
        for tensor, piece in zip(tensors, views_of(vector, tensors), strict=True):
            tensor.detach().copy_(piece)


def one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the vector whose consecutive pieces are the tensors, or None.

    Gradients in a flat buffer are consecutive.
    """
    first = tensors[0].detach()
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    # Each has to begin where the one before it ends, in the same storage.
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != offset:
            return None
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        offset += tensor.numel()
    return first.as_strided((offset - first.storage_offset(),), (1,))
