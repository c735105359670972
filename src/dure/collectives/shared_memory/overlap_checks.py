"""Arguments of a call that share memory: overlapping outputs are refused, inputs are copied.

Other ranks read this rank's input while the rank writes its output. If both share memory, the other
ranks would read old or new values, depending on timing; so a copy of the input takes part in the
call. The exception is a rank's own part in its own position, which no other rank reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dure.errors import CallError
from dure.tensors.overlap import any_overlap, is_same, overlap, overlaps_itself


def check_writable(tensor: Tensor) -> None:
    """Raise CallError for a tensor with several elements at the same address."""
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise CallError(
            "an expanded tensor cannot hold the result, because its elements share memory; "
            "clone() it first"
        )


def check_outputs(outputs: Sequence[Tensor]) -> None:
    """Raise CallError if the outputs of a call share an element."""
    if _row(outputs) is not None:
        return
    for output in outputs:
        check_writable(output)
    if any_overlap(outputs):
        raise CallError(
            "two outputs of this call share memory, so one would overwrite the other: give each "
            "its own"
        )


def check_apart(tensors: Sequence[Tensor]) -> None:
    """Raise CallError for tensors that overlap, unless they are identical."""
    different = [
        tensor
        for index, tensor in enumerate(tensors)
        if not any(is_same(tensor, other) for other in tensors[:index])
    ]
    check_outputs(different)


def check_own_place(part: Tensor, whole: Tensor, rank: int) -> None:
    """Raise CallError for a part that overlaps `whole` elsewhere than in this rank's block.

    `whole` has a block for each rank. Both are contiguous.
    """
    if overlap(part, whole) and part.data_ptr() != whole.data_ptr() + rank * part.nbytes:
        raise CallError(
            f"a tensor of this call overlaps another one, but is not the block of rank {rank}, so "
            "other ranks would read what is written there; give it separate memory"
        )


def meets(tensor: Tensor, others: Sequence[Tensor], own: int | None = None) -> bool:
    """Return whether a tensor shares an element with any of the others.

    own: index of this rank's own part in the others, which may be the same tensor.
    """
    row = _row(others)
    if not others or _beside(_row((tensor,)), row):
        return False
    if row is not None and own is not None and is_same(tensor, others[own]):
        return False  # the others do not meet it
    return any(
        overlap(tensor, other)
        for place, other in enumerate(others)
        if not (place == own and is_same(tensor, other))
    )


def kept(sources: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sources, or copies of all if any source shares an element with an output."""
    if _beside(_row(sources), _row(outputs)):
        return sources
    if any(meets(source, outputs) for source in sources):
        return [source.clone() for source in sources]
    return sources


_Range = tuple[int, int]
"""Addresses [begin, end)."""


def _row(tensors: Sequence[Tensor]) -> _Range | None:
    """Return the address range of contiguous tensors in ascending order; None for other tensors.

    The fast path for a single tensor, and for parts of a buffer.
    """
    begin = end = tensors[0].data_ptr() if tensors else 0
    for tensor in tensors:
        start = tensor.data_ptr()
        if start < end or not tensor.is_contiguous():
            return None
        end = start + tensor.nbytes
    return begin, end


def _beside(one: _Range | None, other: _Range | None) -> bool:
    """Return whether two ranges are known to be disjoint."""
    return one is not None and other is not None and (one[1] <= other[0] or one[0] >= other[1])
