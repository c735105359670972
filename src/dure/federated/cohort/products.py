"""Updates that are matrix products, and their weighted sum without any of them.

Clients that begin at weights that all share move a weight by a product, -lr Lᵀ R of what came from behind in their
steps, L (T, m), and what came from before, R (T, n) (`factored`). A server that takes a weighted mean of C such updates
needs their sum alone, and that is one product more:

    sum over k of w_k (-lr L_kᵀ R_k)  =  -lr [w_1 L_1; ...; w_C L_C]ᵀ [R_1; ...; R_C]

so that C updates of d elements are neither written nor read. Whoever looks at an update by itself gets it: it is
formed then. Equal to the sum of the updates but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

LARGE = 1e30
"""What no element of an update may come near: products that do not are finite, and so are sums of a million of them."""

Part = tuple[Tensor, Tensor] | Tensor
"""One parameter's updates: the factors L and R, (C, T, m) and (C, T, n), or what they are, (C, elements)."""

Sizes = tuple[tuple[int, ...], ...]
"""The shapes of a part's tensors."""


class Products:
    """The updates of C clients. parts: in the order in which parameters lie in flat weights. lr: of the factors."""

    def __init__(self, parts: Sequence[Part], lr: float) -> None:
        self.parts, self.lr = list(parts), lr

    @property
    def clients(self) -> int:
        """C."""
        part = self.parts[0]
        return len(part) if isinstance(part, Tensor) else len(part[0])

    @property
    def elements(self) -> int:
        """Of all parts."""
        return sum(
            part.numel() if isinstance(part, Tensor) else part[0].numel() + part[1].numel() for part in self.parts
        )

    def bounded(self) -> bool:
        """Whether all elements of all updates are finite for sure: |L_kᵀ R_k| <= |L| |R| by Cauchy and Schwarz."""
        tensors = [tensor for part in self.parts for tensor in ((part,) if isinstance(part, Tensor) else part)]
        norms = iter(torch.stack(torch._foreach_norm(tensors)).tolist())
        bounds = [
            next(norms) if isinstance(part, Tensor) else next(norms) * next(norms) * self.lr for part in self.parts
        ]
        return all(bound < LARGE for bound in bounds)  # False where there is a NaN

    def all(self) -> Tensor:
        """(C, d), each by itself."""
        return torch.cat(
            [
                part.flatten(1)
                if isinstance(part, Tensor)
                else (torch.bmm(part[0].transpose(1, 2), part[1]) * -self.lr).flatten(1)
                for part in self.parts
            ],
            1,
        )

    def one(self, place: int) -> Tensor:
        """(d,), that of one client."""
        return torch.cat(
            [
                part[place].reshape(-1)
                if isinstance(part, Tensor)
                else ((part[0][place] * -self.lr).T @ part[1][place]).view(-1)
                for part in self.parts
            ]
        )

    def sum(self, weights: Sequence[float]) -> Tensor:
        """(d,), the weighted sum of all."""
        first = self.parts[0] if isinstance(self.parts[0], Tensor) else self.parts[0][0]
        shares = torch.tensor(weights, dtype=first.dtype, device=first.device)
        scales = (shares * -self.lr).view(-1, 1, 1)
        formed = []
        for part in self.parts:
            if isinstance(part, Tensor):
                formed.append(shares @ part.flatten(1))
            else:
                left = (part[0] * scales).flatten(0, 1)
                formed.append((left.T @ part[1].flatten(0, 1)).view(-1))
        return torch.cat(formed)

    def write(self, memory: Tensor) -> list[Sizes]:
        """Copies the parts to flat memory, one after another; returns what `read` needs."""
        sizes: list[Sizes] = []
        at = 0
        for part in self.parts:
            tensors = (part,) if isinstance(part, Tensor) else part
            for tensor in tensors:
                memory[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
                at += tensor.numel()
            sizes.append(tuple(tuple(tensor.shape) for tensor in tensors))
        return sizes

    @staticmethod
    def read(memory: Tensor, sizes: Sequence[Sizes], lr: float) -> Products:
        """A copy of what was written there."""
        parts: list[Part] = []
        at = 0
        for shapes in sizes:
            tensors = []
            for shape in shapes:
                elements = math.prod(shape)
                tensors.append(memory[at : at + elements].view(shape).clone())
                at += elements
            parts.append(tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1]))
        return Products(parts, lr)


class Deferred(Sequence[Tensor]):
    """A client's update, one flat tensor, which is formed when somebody looks at it. place: the client's in `products`;
    like: shape and dtype as the weights have them."""

    def __init__(self, products: Products, place: int, like: Tensor) -> None:
        self.products, self.place, self.like = products, place, like
        self._formed: Tensor | None = None

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if self._formed is None:
            self._formed = self.products.one(self.place).to(self.like.device)
        return [self._formed][index]
