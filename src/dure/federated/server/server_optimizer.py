"""Server optimizers: move the global model along the mean update Δ.

Δ is the negative of the clients' pseudo-gradient.

    sgd        m <- β1·m + Δ               x <- x + η·m    β1 = 0: FedAvg; β1 > 0: FedAvgM
    adagrad    m <- β1·m + (1 - β1)·Δ      v <- v + Δ²
    adam                                   v <- β2·v + (1 - β2)·Δ²
    yogi                                   v <- v - (1 - β2)·Δ²·sign(v - Δ²)
               x <- x + η·m / (√v + τ)     v begins at τ²; no bias correction, as in algorithm 2

A complex number counts as two real numbers. Moments of weights in half precision are in single
precision, where squares of small updates are not zero.

`step` is functional: it changes no weights and no state in place. Products and sums are rounded
separately, so that every x86 processor gives the same bits (`dure.tensors.unfused_multiply_add`).
Cost: a few passes over d elements on the server; nothing more travels.

Sources: S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2 (β1 = 0.9, β2 =
0.99; Adagrad is used there with β1 = 0); T.-M. H. Hsu, H. Qi, M. Brown, 2019 (FedAvgM).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from dure.arguments import between, check_ranges
from dure.federated.aggregate.mean import wide
from dure.settings import suggestion
from dure.tensors.unfused_multiply_add import square_root

Rule = Literal["sgd", "adagrad", "adam", "yogi"]

State = list[Tensor]
"""Moments m and v, a tensor each for every tensor of the model; empty for plain SGD."""


@dataclass(frozen=True)
class ServerOptimizer:
    """A server rule with its η (lr), β1, β2 and τ."""

    rule: Rule = "sgd"
    lr: float = 1.0
    beta1: float = field(default=0.0, metadata=between(0, 1, "[)"))
    beta2: float = field(default=0.99, metadata=between(0, 1, "[)"))
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(
                f"there is no server optimizer {self.rule!r}{suggestion(self.rule, get_args(Rule))}"
            )
        if not 0 < self.lr < math.inf:
            raise ValueError(f"server_lr is {self.lr}, but it has to be greater than 0")
        check_ranges(self)
        if self.rule != "sgd" and not 0 < self.tau < math.inf:
            raise ValueError(
                f"tau is {self.tau}, but it has to be greater than 0, to avoid division by zero"
            )

    @property
    def follows(self) -> bool:
        """Whether the step is Δ itself, as FedAvg's."""
        return self.rule == "sgd" and self.lr == 1 and not self.beta1

    def start(self, weights: Sequence[Tensor]) -> State:
        """Return the state before the first step."""
        if self.rule == "sgd" and not self.beta1:
            return []
        first = [torch.zeros_like(_counted_in(w)) for w in weights]
        return (
            first
            if self.rule == "sgd"
            else [*first, *(torch.full_like(m, self.tau * self.tau) for m in first)]
        )

    @torch.no_grad()
    def step(
        self, weights: Sequence[Tensor], delta: Sequence[Tensor], state: State, spare: bool = False
    ) -> tuple[list[Tensor], State]:
        """Return (new weights, new state) after a step.

        weights, delta: tensors of the same number and shapes. spare: whether the caller gives up
        delta, so that its memory may be reused.
        """
        # FedAvg's own step: a single pass, and no moments.
        if self.rule == "sgd" and not self.beta1:
            pairs = zip(weights, delta, strict=True)
            return [_stepped(w, d, self.lr, spare) for w, d in pairs], state
        # From here on in the precision of the moments; `kinds` stores the original dtypes.
        kinds = weights
        count = len(weights)
        weights = list(map(_counted_in, weights))
        delta = list(map(_counted_in, delta))
        # Out of place, as everywhere here: a state is a value, and may be in a checkpoint.
        if self.rule == "sgd":
            moments = [m.mul(self.beta1).add_(d) for m, d in zip(state, delta, strict=True)]
            moved = [m.mul(self.lr).add_(w) for w, m in zip(weights, moments, strict=True)]
            return _as_before(moved, kinds), moments
        first = [
            m.mul(self.beta1).add_(d * (1 - self.beta1))
            for m, d in zip(state[:count], delta, strict=True)
        ]
        second = [self._second(v, d.square()) for v, d in zip(state[count:], delta, strict=True)]
        moved = [
            m.div(square_root(v).add_(self.tau)).mul_(self.lr).add_(w)
            for w, m, v in zip(weights, first, second, strict=True)
        ]
        return _as_before(moved, kinds), [*first, *second]

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        if self.rule == "adagrad":
            return v + square
        if self.rule == "adam":
            return v.mul(self.beta2).add_(square.mul_(1 - self.beta2))
        # Yogi moves v by steps of the size of Δ², so v falls only slowly, where Adam forgets it.
        return v - (1 - self.beta2) * square * torch.sign(v - square)


def _stepped(weights: Tensor, delta: Tensor, lr: float, spare: bool) -> Tensor:
    """Return weights + lr·delta, in the memory of delta if `spare`."""
    if lr == 1:
        return torch.add(weights, delta, out=delta if spare else None)
    counted = delta.to(wide(delta.dtype))
    # A copy may be overwritten in any case.
    product = counted.mul_(lr) if spare or counted is not delta else counted * lr
    return product.add_(weights).to(weights.dtype)


def _counted_in(tensor: Tensor) -> Tensor:
    """Return the tensor as real numbers, in the precision of the moments."""
    tensor = tensor.to(wide(tensor.dtype))
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_before(counted: Sequence[Tensor], kinds: Sequence[Tensor]) -> list[Tensor]:
    return [
        (torch.view_as_complex(one) if kind.is_complex() else one).to(kind.dtype)
        for one, kind in zip(counted, kinds, strict=True)
    ]
