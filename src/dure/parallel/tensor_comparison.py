"""Comparison of two computations, which shows that a strategy's form of a model is right.

A traced program, or layers divided by a plan, must compute the same function as the model. Before
the first step both run on the same examples with the same random numbers, and their results are
compared tensor by tensor. Sums in another order differ in their last digits; the tolerances are far
above such differences and far below the errors of a wrong program or plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 2e-2,
}
"""Largest accepted difference, as a share of the largest value, by dtype.

The bound is some thousand units in the last place of float32, and more of float64: a forward and a
backward pass through many layers, with sums in another order, stay well below. Half precision has
two or three digits.
"""

SMALL = 1e-3
"""Share of the largest value of all tensors below which a tensor is compared by that bound.

A gradient that is zero in exact arithmetic, as of a bias before a batch norm, is rounding error.
"""


class TensorDifference(NamedTuple):
    """First tensor that differs: its name, and the difference as a share of its largest value."""

    name: str
    share: float


def first_difference(
    right: Mapping[str, Tensor | None],
    tried: Mapping[str, Tensor | None],
    computed_in: torch.dtype | None = None,
    tolerance: Callable[[torch.dtype], float] | None = None,
) -> TensorDifference | None:
    """Return the first tensor of `right`, in its order, that differs in `tried`; None if all agree.

    All tensors are of one kind, such as all gradients. None stands for a missing gradient, which
    counts as zeros. Values that are infinite or NaN in both are equal. A tensor of another shape or
    dtype, and an integer that differs, differ by inf.

    computed_in: the coarsest dtype on the way to these tensors, as of a model in float32 that
    computes in bfloat16 by autocast; None is each tensor's own dtype. tolerance: the accepted share
    by dtype; by default `tolerance_of`.
    """
    within = tolerance or tolerance_of
    floor: float | None = None
    for name, wanted in right.items():
        given = tried.get(name)
        one = wanted if wanted is not None else given
        # The bits are mostly equal, and a comparison of bits is the fastest.
        if one is None or (wanted is not None and given is not None and _same(wanted, given)):
            continue
        if floor is None:
            floor = SMALL * max(map(_largest, right.values()))
        share = _apart(
            torch.zeros_like(one) if wanted is None else wanted,
            torch.zeros_like(one) if given is None else given,
            floor,
        )
        allowed = within(one.dtype)
        if allowed and computed_in is not None:
            allowed = max(allowed, within(computed_in))
        if share > allowed:
            return TensorDifference(name, share)
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the share of the largest value by which values may differ; 0 for integers."""
    return TOLERANCES.get(dtype.to_real() if dtype.is_complex else dtype, 0.0)


def tolerance_same_operations(dtype: torch.dtype) -> float:
    """Return the tolerance for the same operations, whose sums are mostly in the same order."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(tolerance_of(dtype), 1024 * torch.finfo(dtype).eps)


def tolerance_same_code(dtype: torch.dtype) -> float:
    """Return the tolerance for results of the same code, run a second time on the same machine."""
    # The bits are nearly always equal; only sums that threads add in any order may be rounded.
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(16 * torch.finfo(dtype).eps, 1e-5)


@torch.no_grad()
def _apart(right: Tensor, tried: Tensor, floor: float) -> float:
    """Return the largest difference, as a share of the largest value in `right`, or of `floor`."""
    if right.shape != tried.shape or right.dtype != tried.dtype:
        return math.inf
    if not (right.is_floating_point() or right.is_complex()):
        return 0.0 if torch.equal(right, tried) else math.inf
    apart = _most(right - tried)
    # Values that are not finite must be in the same places in both.
    if not math.isfinite(apart):
        finite = right.isfinite()
        if not torch.equal(finite, tried.isfinite()):
            return math.inf
        apart = _most(right[finite] - tried[finite])
    scale = max(_largest(right), floor)
    # If all values should be zeros, the difference is absolute.
    return apart / scale if scale else apart


@torch.no_grad()
def _largest(tensor: Tensor | None) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    most = _most(tensor)
    return most if math.isfinite(most) else _most(tensor[tensor.isfinite()])


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
