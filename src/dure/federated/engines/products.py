"""Deferred updates that are matrix products, and their weighted sum without forming them.

Clients that start from shared weights move a weight by a product, -lr Lᵀ R of the output gradients
of their steps, L (T, m), and the inputs, R (T, n) (`factored`). A server that takes a weighted mean
of C such updates needs only their sum, which is a single product:

    sum over k of w_k (-lr L_kᵀ R_k)  =  -lr [w_1 L_1; ...; w_C L_C]ᵀ [R_1; ...; R_C]

so that C updates of d elements are neither written nor read. A single update is formed when it is
read. The result equals the sum of the updates except for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, overload

import torch
from torch import Tensor

from dure.machine.threads import threads

LARGE = 1e30
"""Bound far above any element of a valid update.

Products below the bound are finite, and so are sums of a million of them.
"""


class Factors(NamedTuple):
    """Updates of a linear layer: -lr L_kᵀ R_k of its weight, and -lr L_kᵀ 1 of a bias after it.

    left: L, (C, T, m). right: R, (C, T, n).
    """

    left: Tensor
    right: Tensor
    bias: bool

    def formed(self, left: Tensor, right: Tensor) -> list[Tensor]:
        """Return the updates of factors that may be scaled: (..., m n) and, of the bias, (..., m).

        left: (..., T, m). right: (..., T, n).
        """
        weight = (left.transpose(-2, -1) @ right).flatten(-2)
        return [weight, left.sum(-2)] if self.bias else [weight]

    def sum(self, scales: Tensor, places: Iterator[Tensor], beta: float) -> None:
        """Add the sum over k of scales_k L_kᵀ R_k, and the bias's sum, to the next of the places.

        Places are flat; their previous content counts `beta` times. scales: (C T,), of each row.
        The narrower of the factors is scaled.
        """
        left = self.left.flatten(0, 1)
        right = self.right.flatten(0, 1)
        m = left.shape[1]
        n = right.shape[1]
        scaled = (left if m < n else right) * scales.unsqueeze(1)
        # The scales may be on either side of the product: scaling the narrower factor takes fewer
        # multiplications.
        one, other = (scaled, right) if m < n else (left, scaled)
        next(places).view(m, n).addmm_(one.T, other, beta=beta)
        if self.bias:
            next(places).addmv_(left.T, scales, beta=beta)


ProductPart = Factors | Tensor
"""Updates of a layer, or of a parameter: (C, elements)."""

Sizes = tuple[tuple[tuple[int, ...], ...], bool]
"""The shapes of a part's tensors, and whether there is a bias."""


class UpdateProducts:
    """The updates of C clients.

    parts: in the order of the parameters in flat weights. lr: of the factors. threads: of the
    operators that sum them; None is the present number.
    """

    def __init__(self, parts: Sequence[ProductPart], lr: float, threads: int | None = None) -> None:
        self.parts = list(parts)
        self.lr = lr
        self.threads = threads

    @property
    def clients(self) -> int:
        """Number of clients C."""
        return len(_tensors(self.parts[0])[0])

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return _tensors(self.parts[0])[0].device

    @property
    def elements(self) -> int:
        """Number of elements of all parts together."""
        tensors = chain.from_iterable(map(_tensors, self.parts))
        return sum(tensor.numel() for tensor in tensors)

    def bounded(self) -> bool:
        """Return whether the elements of all updates are certainly finite.

        |L_kᵀ R_k| <= |L| |R| by Cauchy and Schwarz.
        """
        # A bound by norms costs a pass over the factors, while forming the updates is the cost to
        # avoid.
        return all(self._bound(part) < LARGE for part in self.parts)  # False with a NaN

    def _bound(self, part: ProductPart) -> float:
        if isinstance(part, Tensor):
            return _norm(part)
        # The bias's factor is a column of T ones, of norm √T.
        ones = math.sqrt(part.right.shape[1]) if part.bias else 0.0
        return _norm(part.left) * max(_norm(part.right), ones) * self.lr

    def all(self) -> Tensor:
        """Return the updates, each formed separately: (C, d)."""
        formed: list[Tensor] = []
        for part in self.parts:
            if isinstance(part, Tensor):
                formed.append(part.flatten(1))
            else:
                formed += part.formed(part.left * -self.lr, part.right)
        return torch.cat(formed, 1)

    def one(self, place: int) -> Tensor:
        """Return the update of a single client: (d,)."""
        formed: list[Tensor] = []
        for part in self.parts:
            if isinstance(part, Tensor):
                formed.append(part[place].reshape(-1))
            else:
                formed += part.formed(part.left[place] * -self.lr, part.right[place])
        return torch.cat(formed)

    def sum(self, weights: Sequence[float], onto: Tensor | None = None) -> Tensor:
        """Return the weighted sum of all updates: (d,).

        onto: (d,), to which the sum is added in place, if given.
        """
        like = _tensors(self.parts[0])[0]
        shares = torch.tensor(weights, dtype=like.dtype, device=like.device)
        sizes = list(chain.from_iterable(map(_elements, self.parts)))
        # The content of the memory counts only if there is a tensor to add to.
        beta = 0 if onto is None else 1
        total = like.new_empty(sum(sizes)) if onto is None else onto
        places = iter(torch.split(total, sizes))
        counts = {part.left.shape[1] for part in self.parts if isinstance(part, Factors)}
        # A client's weight applies to each of its T rows; parts with equal T share the scales.
        scales = {
            rows: (shares * -self.lr).unsqueeze(1).expand(-1, rows).flatten() for rows in counts
        }
        with threads(self.threads):
            for part in self.parts:
                if isinstance(part, Tensor):
                    next(places).addmv_(part.flatten(1).T, shares, beta=beta)
                else:
                    part.sum(scales[part.left.shape[1]], places, beta)
        return total

    def write(self, memory: Tensor) -> list[Sizes]:
        """Copy the parts to flat memory, one after another; return the sizes for `read`."""
        sizes: list[Sizes] = []
        at = 0
        for part in self.parts:
            tensors = _tensors(part)
            for tensor in tensors:
                memory[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
                at += tensor.numel()
            bias = not isinstance(part, Tensor) and part.bias
            sizes.append((tuple(tuple(tensor.shape) for tensor in tensors), bias))
        return sizes

    @staticmethod
    def read(memory: Tensor, sizes: Sequence[Sizes], lr: float) -> UpdateProducts:
        """Return a copy of the products that `write` wrote to the memory."""
        parts: list[ProductPart] = []
        at = 0
        for shapes, bias in sizes:
            tensors = []
            for shape in shapes:
                elements = math.prod(shape)
                # Copied: the child writes its next results to the same memory.
                tensors.append(memory[at : at + elements].view(shape).clone())
                at += elements
            parts.append(tensors[0] if len(tensors) == 1 else Factors(tensors[0], tensors[1], bias))
        return UpdateProducts(parts, lr)


def _elements(part: ProductPart) -> list[int]:
    """Return the numbers of elements of a client's updates of the part's parameters."""
    if isinstance(part, Tensor):
        return [part[0].numel()]
    m = part.left.shape[2]
    n = part.right.shape[2]
    return [m * n, m] if part.bias else [m * n]


def _tensors(part: ProductPart) -> Sequence[Tensor]:
    return (part,) if isinstance(part, Tensor) else (part.left, part.right)


def _norm(tensor: Tensor) -> float:
    """Return the root of the sum of squares, infinite upon overflow."""
    flat = tensor.reshape(-1)
    return math.sqrt(float(torch.dot(flat, flat)))


class DeferredUpdate(Sequence[Tensor]):
    """A client's update, a single flat tensor, which is formed when it is read.

    place: the client's in `products`; like: a tensor with the shape, dtype and device of the
    weights.
    """

    def __init__(self, products: UpdateProducts, place: int, like: Tensor) -> None:
        self.products = products
        self.place = place
        self.like = like
        self._formed: Tensor | None = None

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        # Formed once, and stored as long as the update.
        if self._formed is None:
            self._formed = self.products.one(self.place).to(self.like.device)
        return [self._formed][index]
