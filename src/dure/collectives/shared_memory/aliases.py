"""Arguments of a call that share memory: what is written twice is refused, what is read is kept.

Other ranks read what this one gives while it writes what it gets. A place that is both would give
them what it was or what it is, whichever came first; so there a copy takes part in the call. The
one exception is a rank's own part, which no other rank reads, in its own place.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dure.errors import CallError
from dure.tensors.overlap import any_overlap, is_same, overlap, overlaps_itself


def check_writable(tensor: Tensor) -> None:
    """Raises ValueError for a tensor of which several elements lie in one place."""
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise CallError(
            "an expanded tensor cannot take the result, its elements lie in one place; clone() it "
            "before"
        )


def check_outputs(outputs: Sequence[Tensor]) -> None:
    """Raises ValueError if the outputs of a call have any element in one place."""
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
    """Raises CallError for tensors that lie in each other, unless they are the very same."""
    different = [
        tensor
        for index, tensor in enumerate(tensors)
        if not any(is_same(tensor, other) for other in tensors[:index])
    ]
    check_outputs(different)


def check_own_place(part: Tensor, whole: Tensor, rank: int) -> None:
    """Raises ValueError for a part that lies in `whole`, one block a rank, but not as this rank's.

    Both are contiguous.
    """
    if overlap(part, whole) and part.data_ptr() != whole.data_ptr() + rank * part.nbytes:
        raise CallError(
            f"a tensor of this call lies in another one, and not as the block of rank {rank}: what "
            f"is written there would be read by other ranks; give it memory of its own"
        )


def meets(tensor: Tensor, others: Sequence[Tensor], own: int | None = None) -> bool:
    """Whether a tensor has an element in the place of another's.

    own: which of the others is this rank's own part, and may be the very same tensor.
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
    """The sources; copies, if one of them has an element in the place of an output's."""
    if _beside(_row(sources), _row(outputs)):
        return sources
    if any(meets(source, outputs) for source in sources):
        return [source.clone() for source in sources]
    return sources


_Range = tuple[int, int]
"""Addresses, from the first to the one after the last."""


def _row(tensors: Sequence[Tensor]) -> _Range | None:
    """Where contiguous tensors lie, if they lie one after another; else None.

    That is the quick way for one tensor, and for parts of one buffer.
    """
    begin = end = tensors[0].data_ptr() if tensors else 0
    for tensor in tensors:
        start = tensor.data_ptr()
        if start < end or not tensor.is_contiguous():
            return None
        end = start + tensor.nbytes
    return begin, end


def _beside(one: _Range | None, other: _Range | None) -> bool:
    """Whether two ranges are known to be apart."""
    return one is not None and other is not None and (one[1] <= other[0] or one[0] >= other[1])
