"""Call of a rank: kinds, dtypes and operations as numbers, and calls as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from dure.errors import CallError, MismatchError

ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, BARRIER = (
    range(1, 10)
)
BEGUN_REDUCE_SCATTER, BEGUN_ALL_REDUCE, END_OF_ALL_REDUCES = range(10, 13)

KINDS: Final = dict(
    enumerate(
        (
            "all_reduce",
            "reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "gather",
            "scatter",
            "all_to_all",
            "barrier",
            "begun reduce_scatter",
            "begun all_reduce",
            "end of begun all_reduces",
        ),
        start=1,  # 0 is a rank that has not called yet: its memory is zeros
    )
)

_REDUCTIONS: Final = (ALL_REDUCE, REDUCE, REDUCE_SCATTER, BEGUN_REDUCE_SCATTER, BEGUN_ALL_REDUCE)

OPERATIONS: Final = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, AVG = range(8)

_SUM: Final = ReduceOp.SUM
_BY_REDUCE_OP: Final = {
    ReduceOp.SUM: SUM,
    ReduceOp.PRODUCT: PRODUCT,
    ReduceOp.MIN: MIN,
    ReduceOp.MAX: MAX,
    ReduceOp.BAND: BAND,
    ReduceOp.BOR: BOR,
    ReduceOp.BXOR: BXOR,
    ReduceOp.AVG: AVG,
}
REDUCIBLE: Final = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
)
"""Dtypes for reductions; their positions are their numbers in the C core."""

SENSIBLE: Final = {
    (dtype, op)
    for dtype in REDUCIBLE
    for op in range(len(OPERATIONS))
    if op not in ((BAND, BOR, BXOR) if dtype.is_floating_point else (AVG,))
}
"""Valid combinations of dtype and operation."""
# All other dtypes of torch, which can be sent and not reduced. Sorted by name, and without aliases
# such as torch.cfloat: so a dtype has the same number on all ranks.
_OTHERS: Final = tuple(
    value
    for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype)
    and value not in REDUCIBLE
    and name == str(value).removeprefix("torch.")
)
_DTYPES: Final = (*REDUCIBLE, *_OTHERS)
NUMBER_OF: Final = {dtype: number for number, dtype in enumerate(_DTYPES)}


def name_of(dtype: int) -> str:
    """Return the name of a dtype by its number, which may be any number from a peer."""
    known = 0 <= dtype < len(_DTYPES)
    return (
        str(_DTYPES[dtype]).removeprefix("torch.") if known else f"elements of no dtype ({dtype})"
    )


@dataclass(frozen=True)
class CollectiveCall:
    """Call of a rank in a collective.

    count: elements. extra: a hash of the sizes if they may be unequal, else 0.
    """

    kind: int
    dtype: int = 0
    op: int = 0
    root: int = -1
    count: int = 0
    extra: int = 0

    def __str__(self) -> str:
        if self.kind not in KINDS:
            return f"no call ({self.kind})" if self.kind else "nothing"
        name = KINDS[self.kind]
        if self.kind in (BARRIER, END_OF_ALL_REDUCES):
            return name
        # The numbers may be anything, for example after a rank's memory was overwritten.
        words = [_operation(self.op)] if self.kind in _REDUCTIONS else []
        words += [f"root {self.root}"] if self.root >= 0 else []
        sizes = f" in unequal parts ({self.extra & 0xFFFF:04x})" if self.extra else ""
        return f"{name}({', '.join([*words, f'{self.count} {name_of(self.dtype)}'])}{sizes})"


def _operation(number: int) -> str:
    return OPERATIONS[number] if 0 <= number < len(OPERATIONS) else f"no operation ({number})"


def operation_of(op: ReduceOp | ReduceOp.RedOpType) -> int:
    """Return the number of torch's operation.

    Raises CallError for an operation that is not a reduction of plain tensors.
    """
    if op == _SUM:  # by far the most frequent; the lookup below takes a microsecond
        return SUM
    # A ReduceOp has the plain operation as `op`; a RedOpType is the plain operation.
    number = _BY_REDUCE_OP.get(getattr(op, "op", op))  # type: ignore[arg-type]
    if number is None:
        raise CallError(
            f"{op} is not supported by the dure backend; choose one of {', '.join(OPERATIONS)}"
        )
    return number


def check_reducible(dtype: torch.dtype, op: int) -> None:
    """Raise CallError if the operation is invalid for the dtype."""
    if (dtype, op) in SENSIBLE:
        return
    if dtype not in REDUCIBLE:
        known = ", ".join(str(known).removeprefix("torch.") for known in REDUCIBLE)
        raise CallError(f"tensors of {dtype} cannot be reduced; these can: {known}")
    if op == AVG:
        raise CallError(f"the average of {dtype} is not a {dtype}: sum it, or use a floating dtype")
    raise CallError(f"{OPERATIONS[op]} works on bits of integers, not on {dtype}")


def check_tensor(tensor: Tensor) -> None:
    """Raise CallError for a tensor that is not dense in the memory of this host."""
    if (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_neg() or tensor.is_conj())
    ):
        return
    if tensor.layout is not torch.strided:
        raise CallError(
            f"the dure backend takes dense tensors, not {tensor.layout}: call to_dense() first"
        )
    if tensor.is_cpu:
        raise CallError(
            "the tensor is a negated or conjugated view: call resolve_neg().resolve_conj() first"
        )
    raise CallError(
        f"the dure backend takes CPU tensors, not one on {tensor.device}: use nccl for those, as a "
        f"group of its own"
    )


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in one dimension.

    Tensors of at most a single element are contiguous whatever their strides.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    return flat(tensor).view(torch.uint8)


def mismatch(number: int, calls: Sequence[CollectiveCall], names: Sequence[int]) -> MismatchError:
    """Return the error for ranks whose calls differ; the same on every rank.

    names: names of the ranks in errors.
    """
    # Ranks with the same call are grouped: "ranks 0, 2: …; rank 1: …".
    made: dict[str, list[int]] = {}
    for name, call in zip(names, calls, strict=True):
        made.setdefault(str(call), []).append(name)
    return MismatchError(
        f"call {number}", tuple((tuple(ranks), text) for text, ranks in made.items())
    )


def unequal(
    number: int,
    call: CollectiveCall,
    deal: Callable[[int, int], tuple[int, int]],
    names: Sequence[int],
) -> MismatchError:
    """Return the error for the first pair of ranks with different offered and wanted bytes.

    deal(i, j): the bytes that rank i offers to rank j, and the bytes that rank i wants from rank j.
    """
    name = KINDS[call.kind]
    for i, sender in enumerate(names):
        for j, receiver in enumerate(names):
            offered = deal(i, j)[0]
            wanted = deal(j, i)[1]
            if offered != wanted:
                gives = f"{name} with {offered} bytes for rank {receiver}"
                takes = f"{name} with room for {wanted} bytes of rank {sender}"
                return MismatchError(f"call {number}", (((sender,), gives), ((receiver,), takes)))
    raise AssertionError("all deals agree")
