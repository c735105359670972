"""The weights of clients that began at the same ones, as those and what each has added: products that are never formed.

In T steps of SGD a layer's weight moves by products of what came from behind, L_t (B, m), and from before, R_t (B, n):

    W = W_0 - lr (L_1ᵀ R_1 + ... + L_tᵀ R_t) = W_0 - lr Lᵀ R          L (t B, m), R (t B, n): the rows of all steps

which a layer can compute with as it is:

    forward     x Wᵀ = x W_0ᵀ - lr (x Rᵀ) L
    backward    g W  = g W_0  - lr (g Lᵀ) R

All clients read one W_0, in one large product, and nobody writes m n elements in every step. It pays while the factors
are smaller than the weight, T B (m + n) < m n: for the few small batches that a client has.
"""

from __future__ import annotations

import torch
from torch import Tensor


def few(shape: tuple[int, ...]) -> int:
    """So many rows are the most whose factors are smaller than a weight of this shape; 0 for what is no matrix."""
    return (shape[0] * shape[1] - 1) // (shape[0] + shape[1]) if len(shape) == 2 else 0


def pays(rows: int, shape: tuple[int, ...]) -> bool:
    """Whether there are rows, and few."""
    return 0 < rows <= few(shape)


class Factored:
    """start: W_0, (m, n). clients: C. rows: of all steps of the client that has most."""

    def __init__(self, start: Tensor, clients: int, rows: int, lr: float) -> None:
        self.start, self.clients, self.rows, self.lr = start, clients, rows, lr
        self.left = self.right = start.new_empty(0)
        self._used = 0

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias for the first A clients: x (A, B, n); bias (m,), or (A, m)."""
        if bias is None or bias.ndim == 1:
            y = torch.nn.functional.linear(x, self.start, bias)
        else:
            y = torch.matmul(x, self.start.T).add_(bias.unsqueeze(1))
        if self._used:
            left, right = self._of(x.shape[0])
            y.baddbmm_(torch.bmm(x, right.transpose(1, 2)), left, alpha=-self.lr)
        return y

    def backward(self, g: Tensor) -> Tensor:
        """g W for the first A clients: g (A, B, m)."""
        x = torch.matmul(g, self.start)
        if self._used:
            left, right = self._of(g.shape[0])
            x.baddbmm_(torch.bmm(g, left.transpose(1, 2)), right, alpha=-self.lr)
        return x

    def step(self, left: Tensor, right: Tensor) -> None:
        """W <- W - lr leftᵀ right for the first A clients: (A, B, m), (A, B, n)."""
        clients, rows = left.shape[:2]
        if rows == self.rows and clients == self.clients:  # it is the only one
            self.left, self.right, self._used = left, right, rows
            return
        if not self._used:
            self.left, self.right = (like.new_empty(self.clients, self.rows, like.shape[2]) for like in (left, right))
        now = slice(self._used, self._used + rows)
        for factor, added in ((self.left, left), (self.right, right)):
            factor[:clients, now] = added
            if clients < self.clients:
                factor[clients:, now] = 0
        self._used += rows

    def change(self, out: Tensor) -> None:
        """Writes W - W_0 of each client to out, (C, m n)."""
        left, right = self.factors()
        out.view(self.clients, *self.start.shape).baddbmm_(left.transpose(1, 2), right, beta=0, alpha=-self.lr)

    def factors(self) -> tuple[Tensor, Tensor]:
        """L and R of all steps."""
        return self._of(self.clients)

    def _of(self, clients: int) -> tuple[Tensor, Tensor]:
        return self.left[:clients, : self._used], self.right[:clients, : self._used]
