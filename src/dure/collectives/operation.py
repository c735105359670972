"""Operations of a reduction, sum, average, minimum, maximum, product, and their dtypes.

float16 and bfloat16 are added, multiplied and compared in float32. Algorithms that send partial
results (ring, tree, halving_doubling, hierarchical) round each to the tensor's dtype before
sending, so that the bytes are the tensor's. With u = 2^-11 (float16) or 2^-8 (bfloat16) the error
of a sum is at most about d·u·Σ|x_r|, where d is the number of sequential additions: N-1 in a ring,
about log2 N in a tree or by halving. If a single rank sees all parts (master, one_shot) they are
added in float32 and rounded once: u·|Σ x_r|, plus the errors of float32 sums.

The average is the sum divided by N. In float16 each part is divided before the sum, as in NCCL, so
that a partial sum overflows only if the average does.

Integers wrap around as in torch. For bool sum and max are `or`, product and min are `and`. Minimum
and maximum are NaN if any rank has NaN, as in torch.minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Op = Literal["sum", "avg", "min", "max", "product"]
OPS: tuple[str, ...] = get_args(Op)

_FUNCTIONS: dict[str, Any] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_TORCH = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed dtypes for unsigned dtypes with little support in torch.

Two's complement adds and multiplies the same bits.
"""
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED}
_HALVES = {torch.float16, torch.bfloat16}
_COMPLEX = {torch.complex64, torch.complex128}
_REDUCIBLE = {*_INTEGERS, *_HALVES, torch.float32, torch.float64, *_COMPLEX}


@dataclass(frozen=True)
class Reduction:
    """Operation over `size` ranks: combination of two parts, and the final step."""

    op: Op = "sum"
    size: int = 1

    def combine(self, one: Tensor, other: Tensor, out: Tensor) -> None:
        """Compute out = one ∘ other, elementwise; `out` may be either operand."""
        function = _FUNCTIONS[self.op]
        signed = _SIGNED.get(out.dtype)
        if signed is None:
            function(one, other, out=out)
            return
        # Views of the same bits: nothing is copied, and `out` is filled through its view.
        one = one.view(signed)
        other = other.view(signed)
        out = out.view(signed)
        if self.op in ("sum", "product"):
            function(one, other, out=out)
            return
        # Flipping the highest bit turns unsigned order into signed order; the end flips it back.
        lowest = torch.iinfo(signed).min
        function(one ^ lowest, other ^ lowest, out=out)
        out.bitwise_xor_(lowest)

    def finish(self, whole: Tensor) -> None:
        """Turn a sum into the average, in place. Other operations need no final step."""
        if self.op == "avg":
            whole.div_(self.size)

    def partial(self) -> Reduction:
        """Return the operation without its final step, for a first stage before another stage."""
        return replace(self, op="sum") if self.op == "avg" else self

    def accumulator(self, tensor: Tensor) -> Tensor:
        """Return the tensor for the sum of all parts: `tensor`, or a copy of higher precision."""
        return tensor.float() if tensor.dtype in _HALVES else tensor

    def fold(self, parts: Sequence[Tensor], mine: int, out: Tensor) -> None:
        """Compute the finished result of all parts, in their order, into `out`.

        `parts[mine]` stays unchanged, unless it is `out`. All other parts are scratch.
        Half-precision numbers are rounded once.
        """
        if len(parts) == 1:
            if out is not parts[0]:
                out.copy_(parts[0])
            self.finish(out)
            return
        exact = out.dtype not in _HALVES
        # Partial results need memory outside this rank's own part: another rank's part, which is
        # not read again, or for half precision a float32 tensor.
        scratch = (
            (parts[1] if mine == 0 else parts[0])
            if exact
            else torch.empty_like(out, dtype=torch.float32)
        )
        target = out if exact else scratch
        so_far = parts[0]
        for position, part in enumerate(parts[1:], 2):
            # Only the last step writes to `out`, which may be this rank's own part.
            into = target if position == len(parts) else scratch
            self.combine(so_far if exact else so_far.float(), part, into)
            so_far = into
        self.finish(target)
        if target is not out:
            out.copy_(target)

    def divides_first(self, dtype: torch.dtype) -> bool:
        """Return whether every part is divided before the sum, which then needs no final step."""
        return self.op == "avg" and dtype == torch.float16

    def begin(self, flat: Tensor) -> Reduction:
        """Divide `flat` in place if the division comes first; return the remaining reduction."""
        if not self.divides_first(flat.dtype):
            return self
        flat.div_(self.size)
        return self.partial()


SUM = Reduction()


def reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction:
    """Return the reduction for `op`: one of `OPS`, or a member of torch.distributed.ReduceOp.

    Raises ValueError for an unknown operation, and for an operation that the dtype lacks.
    """
    name = (
        op
        if isinstance(op, str)
        else next((name for name, its in _TORCH.items() if op == its), None)
    )
    if name not in OPS:
        raise ValueError(f"there is no operation {op!r}; choose one of {', '.join(OPS)}")
    if dtype not in _REDUCIBLE:
        raise ValueError(f"tensors of {dtype} cannot be reduced; convert them first")
    if name == "avg" and dtype in _INTEGERS:
        raise ValueError(
            f"the average of {dtype} is not of that dtype; use the sum, or convert to a float first"
        )
    if name in ("min", "max") and dtype in _COMPLEX:
        raise ValueError(f"numbers of {dtype} have no order, so there is no {name}")
    return Reduction(name, size)  # type: ignore[arg-type]


def in_torch(reduction: Reduction, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
    """Return the operation of torch.distributed whose result `Reduction.finish` completes.

    For bool the operation is on bytes.
    """
    # Backends do not average everywhere; bool travels as bytes of 0 and 1, whose sum could be 2.
    op = reduction.partial().op
    if dtype == torch.bool:
        op = {"sum": "max", "product": "min"}.get(op, op)  # type: ignore[assignment]
    return _TORCH[op]
