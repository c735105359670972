"""Factored weights: shared start weights, and products that are never formed.

In T steps of SGD a layer's weight moves by products of the output gradients L_t (B, m) and the
inputs R_t (B, n):

    W = W_0 - lr (L_1ᵀ R_1 + ... + L_tᵀ R_t) = W_0 - lr Lᵀ R

where L (t B, m) and R (t B, n) have the rows of all steps. A layer can compute with the factors
directly:

    forward     x Wᵀ = x W_0ᵀ - lr (x Rᵀ) L
    backward    g W  = g W_0  - lr (g Lᵀ) R

All clients read the same W_0, in a large product, and no step writes m n elements. Factors pay for
clients with few small batches (`which_pay`).

A layer's bias is the weight of an input that is always 1. So it has the factors L and a column of
ones, which need not be stored:

    forward     x Wᵀ + b = x W_0ᵀ + b_0 - lr (x Rᵀ + 1) L
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def which_pay(rows: int, shapes: Sequence[tuple[int, ...]]) -> list[bool]:
    """Return which weights of these shapes are factored for `rows` rows in all steps.

    A weight is factored if T B (m + n) < 2 m n, because a per-client weight comes with its change.
    If all factors together would be larger than the weights, only weights larger than their own
    factors are factored.
    """
    matrices = [len(shape) == 2 and rows > 0 for shape in shapes]
    factors = [
        rows * sum(shape) if matrix else 0 for shape, matrix in zip(shapes, matrices, strict=True)
    ]
    weights = [math.prod(shape) for shape in shapes]
    # 2: a per-client weight comes with a change of the same size. 1: the weight alone.
    for most in (2, 1):
        pay = [
            matrix and own < most * weight
            for matrix, own, weight in zip(matrices, factors, weights, strict=True)
        ]
        kept = sum(
            own if pays else weight for pays, own, weight in zip(pay, factors, weights, strict=True)
        )
        if kept <= sum(weights):
            break
    return pay


class Factored:
    """A layer's weight in factored form.

    start: W_0, (m, n). clients: C. rows: of all steps of the client with the most.
    """

    def __init__(self, start: Tensor, clients: int, rows: int, lr: float) -> None:
        self.start = start
        self.clients = clients
        self.rows = rows
        self.lr = lr
        self.left = self.right = start.new_empty(0)
        self._used = 0

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b for the first A clients: x (A, B, n); bias: b_0, (m,), or None."""
        y = torch.nn.functional.linear(x, self.start, bias)
        if self._used:
            # Two thin products instead of a weight: (x Rᵀ), then times L.
            left, right = self._of(x.shape[0])
            along = torch.bmm(x, right.transpose(1, 2))
            # + 1: the product of x with the column of ones, whose weight is the bias.
            y.baddbmm_(along if bias is None else along.add_(1), left, alpha=-self.lr)
        return y

    def backward(self, g: Tensor) -> Tensor:
        """Return g W for the first A clients: g (A, B, m)."""
        x = torch.matmul(g, self.start)
        if self._used:
            left, right = self._of(g.shape[0])
            x.baddbmm_(torch.bmm(g, left.transpose(1, 2)), right, alpha=-self.lr)
        return x

    def step(self, left: Tensor, right: Tensor) -> None:
        """Compute W <- W - lr leftᵀ right for the first A clients: (A, B, m), (A, B, n)."""
        clients, rows = left.shape[:2]
        if rows == self.rows and clients == self.clients:  # the only step
            self.left = left
            self.right = right
            self._used = rows
            return
        # Factors of all steps one after another, so that each later step is still a single product.
        if not self._used:
            self.left, self.right = (
                like.new_empty(self.clients, self.rows, like.shape[2]) for like in (left, right)
            )
        now = slice(self._used, self._used + rows)
        for factor, added in ((self.left, left), (self.right, right)):
            factor[:clients, now] = added
            # Clients without further steps add nothing.
            if clients < self.clients:
                factor[clients:, now] = 0
        self._used += rows

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return L and R of all steps."""
        return self._of(self.clients)

    def _of(self, clients: int) -> tuple[Tensor, Tensor]:
        return self.left[:clients, : self._used], self.right[:clients, : self._used]
