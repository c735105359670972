"""Arguments of the backend's calls: checks, and parts laid out consecutively."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dure.collectives.arguments import check_root
from dure.collectives.shared_memory.calls import AVG, SUM, check_reducible, check_tensor
from dure.errors import CallError


def single(values: list[Any]) -> Any:
    """Return the only value of a list.

    torch's calls take lists for processes with several devices.
    """
    if len(values) != 1:
        raise CallError(
            f"this call takes a single tensor, or list, of each rank, not {len(values)}"
        )
    return values[0]


def some(name: str, tensors: Sequence[Any]) -> None:
    """Raise CallError for an empty list."""
    if not tensors:
        raise CallError(f"{name} requires non-empty tensor lists, and this one has no tensors")


def root_of(opts: Any, size: int) -> int:
    """Return the root in the options of a call. Raises CallError if it is not a rank."""
    root: int = opts.rootRank if opts is not None else 0
    check_root(root, size)
    return root


def check_alike(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise CallError unless a rank's tensors for a call have the same shape and dtype."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            raise CallError(
                f"the tensors that a rank gives to one {name} have one shape and dtype, not "
                f"{tuple(first.shape)} of {first.dtype} and {tuple(tensor.shape)} of {tensor.dtype}"
            )


def check_pairs(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise CallError unless there are as many outputs as inputs, and at least one."""
    some(name, inputs)
    if len(outputs) != len(inputs):
        raise CallError(
            f"{name} of {len(inputs)} tensors takes as many outputs, not {len(outputs)}"
        )


def check_like(tensor: Tensor, other: Tensor) -> None:
    """Raise CallError unless the tensor is dense, on the CPU, and has the other's dtype."""
    check_tensor(tensor)
    if tensor.dtype != other.dtype:
        raise CallError(
            f"all tensors of a call have one dtype, not {tensor.dtype} and {other.dtype}"
        )


def reducible(tensor: Tensor, op: int) -> Tensor:
    """Return the tensor in the form for reduction. Raises ValueError for an invalid operation."""
    check_tensor(tensor)
    # The sum of complex numbers is that of their parts; a product, or an order, is not.
    if tensor.is_complex() and op in (SUM, AVG):
        tensor = torch.view_as_real(tensor)
    check_reducible(tensor.dtype, op)
    return tensor


def unequal(sizes: Sequence[int]) -> int:
    """Return a hash of sizes that are not all equal, which all ranks must agree on; else 0."""
    # crc32 because Python's own hash differs between processes; 1 more, so that it is never 0.
    return 1 + zlib.crc32(repr(tuple(sizes)).encode()) if len(set(sizes)) > 1 else 0


def dense_like(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous, else an empty contiguous tensor like it."""
    return (
        tensor
        if tensor.is_contiguous()
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )


def copy_back(dense: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(dense, targets, strict=True):
        if source is not target:
            target.copy_(source)


def offers(parts: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return (offset, length) in bytes of each part in their concatenation."""
    ends = accumulate(part.nbytes for part in parts)
    return [(end - part.nbytes, part.nbytes) for end, part in zip(ends, parts, strict=True)]


def split(tensor: Tensor, splits: list[int], size: int) -> list[Tensor]:
    """Return parts along the first dimension: of these lengths, or `size` parts."""
    if splits:
        return list(torch.split(tensor, splits))
    return list(tensor.tensor_split(size)) if tensor.dim() else [tensor] * size


def check_scattered(output: Tensor, source: Tensor, ranks: int) -> None:
    """Raise CallError unless `source` has `ranks` times as many elements as `output`."""
    _check_dtypes("reduce_scatter", output, source)
    if source.numel() != output.numel() * ranks:
        raise CallError(
            f"reduce_scatter of {source.numel()} elements among {ranks} ranks, into "
            f"{output.numel()}: the input must have exactly {ranks} times as many"
        )


def own_block(own: Sequence[Tensor], output: Tensor, op: int) -> list[Tensor]:
    """Return the parts of a block like `output`, in the form for reduction.

    Raises CallError unless they are contiguous and together as long as `output`, or absent.
    """
    parts = [reducible(part, op) for part in own]
    dtype = output.dtype
    elements = sum(part.numel() for part in parts)
    if parts and (
        elements != output.numel()
        or any(part.dtype != dtype or not part.is_contiguous() for part in parts)
    ):
        raise CallError(
            f"a reduce_scatter into {output.numel()} elements of {dtype} takes an own block of as "
            f"many, in "
            f"contiguous parts; these have {elements}, of "
            f"{', '.join(sorted({str(part.dtype) for part in parts}))}"
        )
    return parts


def check_gathered(output: Tensor, source: Tensor, ranks: int) -> None:
    """Raise CallError unless `output` has `ranks` times as many elements as `source`."""
    _check_dtypes("all_gather", output, source)
    if output.numel() != source.numel() * ranks:
        raise CallError(
            f"all_gather of {source.numel()} elements from each of {ranks} ranks, into "
            f"{output.numel()}: the output must have exactly {ranks} times as many"
        )


def _check_dtypes(name: str, output: Tensor, source: Tensor) -> None:
    if source.dtype != output.dtype:
        raise CallError(f"{name} of {source.dtype} into {output.dtype}: they have to be the same")
