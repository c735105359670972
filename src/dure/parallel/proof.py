"""Two ways to compute the same, compared: what a strategy believes about a model is tried first.

A traced program, or layers divided by a plan, have to compute what the model computes. Before the
first step both are run on the same examples with the same random numbers, and what they give is
compared tensor by tensor. Sums in another order differ in their last digits; the tolerances are far
above that and far below what a wrong program or plan does.
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
"""The largest difference, as a share of the largest value, by dtype.

Some thousand units in the last place of float32, and more of float64: a forward and a backward pass
through many layers, whose sums are taken in another order, stay well below. Half precision has
three digits and two.
"""

SMALL = 1e-3
"""Tensors whose values are all below this share of the largest of all tensors are compared by it.

A gradient that ought to be zero, as of a bias before a batch norm, is what rounding has left.
"""


class Difference(NamedTuple):
    """The first tensor that differs: its name, and by how much of its largest value."""

    name: str
    share: float


def first_difference(
    right: Mapping[str, Tensor | None],
    tried: Mapping[str, Tensor | None],
    computed_in: torch.dtype | None = None,
    tolerance: Callable[[torch.dtype], float] | None = None,
) -> Difference | None:
    """The first of the tensors in `right`, in their order, that `tried` has otherwise.

    Tensors of one kind, such as all gradients. None stands for a gradient that is not there, which
    is one of zeros. What is infinite or NaN in both is alike. A tensor of another shape or dtype,
    and a whole number that differs, differ by inf.

    computed_in: the coarsest dtype on the way to these tensors, as of a model in float32 that
    computes in bfloat16 by autocast; None is that of each tensor. tolerance: by dtype; by default
    `tolerance_of`.
    """
    within = tolerance or tolerance_of
    floor: float | None = None
    for name, wanted in right.items():
        given = tried.get(name)
        one = wanted if wanted is not None else given
        # Mostly the bits are the same, which is found out the fastest.
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
            return Difference(name, share)
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def tolerance_of(dtype: torch.dtype) -> float:
    """The share of the largest value by which values may differ; 0 for whole numbers."""
    return TOLERANCES.get(dtype.to_real() if dtype.is_complex else dtype, 0.0)


def same_operations(dtype: torch.dtype) -> float:
    """The same for what the same operations have computed, whose sums are mostly in one order."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(tolerance_of(dtype), 1024 * torch.finfo(dtype).eps)


def once_more(dtype: torch.dtype) -> float:
    """The same for what the same code has computed a second time, on the same machine."""
    # Nearly always the bits are the same; only what threads add up in any order may be rounded.
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(16 * torch.finfo(dtype).eps, 1e-5)


@torch.no_grad()
def _apart(right: Tensor, tried: Tensor, floor: float) -> float:
    """How far two tensors are apart, as a share of the largest value in `right`, or of `floor`."""
    if right.shape != tried.shape or right.dtype != tried.dtype:
        return math.inf
    if not (right.is_floating_point() or right.is_complex()):
        return 0.0 if torch.equal(right, tried) else math.inf
    apart = _most(right - tried)
    # Where something is not finite, both have to be so in the same places.
    if not math.isfinite(apart):
        finite = right.isfinite()
        if not torch.equal(finite, tried.isfinite()):
            return math.inf
        apart = _most(right[finite] - tried[finite])
    scale = max(_largest(right), floor)
    # Where all ought to be zeros, what differs is taken as it is.
    return apart / scale if scale else apart


@torch.no_grad()
def _largest(tensor: Tensor | None) -> float:
    """The largest finite absolute value; 0 where there is none."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    most = _most(tensor)
    return most if math.isfinite(most) else _most(tensor[tensor.isfinite()])


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
