"""One value that crosses a cut, in fewer bytes: there, and the gradient for it back.

    cast       a^ = C(a)                                    g^ = C(g)
    int8       a^ = C(a)                                    g^ = C(g + e),  e <- g + e - g^
    top-k:R    a^ = a at the k = ⌈R d⌉ places of an         g^ = g at these places, else 0
               example where |a| is largest, else 0

The tail goes forward from a^, and g is the gradient by it. For B examples of d numbers of b bytes:

               bytes there         bytes back
    cast       2 B d               2 B d
    int8       B d + 4 B           B d + 4 B        8 B in float64
    top-k:R    k B (b + i)         k B b            i = 1 for up to 256 numbers, 2 for up to 32768,
                                                    else 4; as it is, B d b, where k = d

All is done example by example, of what the dimension that grows with the batch counts: what is made
of one does not depend on who else is in the batch. What travels of a value is one tensor: uint8, of
a length that both know, or of gradients at places the numbers themselves.

Error feedback is that of gradients, where the codec remembers (int8): place i of a batch adds what
the batch before has lost at place i. So what arrives at a place adds up, over the steps, to what
was to be sent there, less the last error: of the head's gradient, what all examples have in common
is only late, and what is one example's own gets noise of half a unit at most. e is forgotten when a
turn begins, for others have trained the head since then, and when a batch has another shape.
Nothing of it outlives a round.

Values have none: what one example has lost says nothing of the next. AQ-SGD sends what has changed
of an example since the pass before; both ends have to keep the values of all examples, and the
server has to be told which example is which. Top-k needs none: only numbers that the tail has seen
have a gradient, and all of it is sent.

Sources: Zheng et al. 2023, "Reducing Communication for Split Learning by Randomized Top-k
Sparsification", IJCAI: top-k of each example, and gradients at its places (here without random
places); Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation
Compression with Guarantees", NeurIPS: AQ-SGD; Rudakov et al. 2023, "Activations and Gradients
Compression for Model-Parallel Training": gradients at places of their own may diverge.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dure.collectives.compression import Compression
from dure.split.leakage.rows import as_rows, from_rows
from dure.tensors.elements import element_bytes


class Crossed(NamedTuple):
    """A value that crosses a cut.

    shape: for so many examples, which dimension `dim` counts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    examples: int

    def like(self, examples: int) -> Tensor:
        """One of so many examples, without data."""
        shape = list(self.shape)
        shape[self.dim] = shape[self.dim] * examples // self.examples
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def rows(self, examples: int) -> Tensor:
        """The same as a matrix of real numbers, a row an example."""
        return as_rows([self.like(examples)], [self.dim])


class Coder(Protocol):
    """At one end of a cut, where it remembers what both know of the batch, and what was lost."""

    def write(self, value: Tensor) -> Tensor:
        """What is sent of a value."""

    def read(self, sent: Tensor, examples: int) -> Tensor:
        """The value of so many examples. Raises ValueError for what is none."""

    def write_back(self, gradient: Tensor) -> Tensor:
        """What is sent of the gradient for the value that was read last."""

    def read_back(self, sent: Tensor, examples: int) -> Tensor:
        """The gradient for the value that was written last. Raises ValueError for what is none."""

    def forget(self) -> None:
        """A turn begins."""

    def nbytes(self, examples: int) -> tuple[int, int]:
        """Bytes of a value, and of its gradient."""


class Rounded:
    """By a codec, whose error feedback is that of gradients."""

    def __init__(self, compression: Compression, crossed: Crossed) -> None:
        self.compression = compression
        self.crossed = crossed
        self._lost: Tensor | None = None

    def forget(self) -> None:
        self._lost = None

    def write(self, value: Tensor) -> Tensor:
        return self.compression.encode([as_rows([value.detach()], [self.crossed.dim])])

    def read(self, sent: Tensor, examples: int) -> Tensor:
        rows = self._decoded(sent, self.crossed.rows(examples))
        dim = self.crossed.dim
        return from_rows(rows, [self.crossed.like(examples)], [dim])[0]

    def _decoded(self, sent: Tensor, like: Tensor) -> Tensor:
        # Room is made for as much as has come, not for as much as a message says.
        if sent.numel() < like.numel():
            raise ValueError(f"{sent.numel()} bytes are too few for {like.numel()} numbers")
        return self.compression.decode(sent, [torch.empty_like(like, device=sent.device)])[0]

    def write_back(self, gradient: Tensor) -> Tensor:
        rows = as_rows([gradient], [self.crossed.dim])
        if not self.compression.remembers:
            return self.compression.encode([rows])
        if self._lost is not None and self._lost.shape == rows.shape:
            rows = rows + self._lost
        sent = self.compression.encode([rows])
        self._lost = rows - self._decoded(sent, rows)
        return sent

    def read_back(self, sent: Tensor, examples: int) -> Tensor:
        return self.read(sent, examples)

    def nbytes(self, examples: int) -> tuple[int, int]:
        rows = torch.empty_like(self.crossed.rows(examples), device="cpu")
        size = self.compression.payload_bytes([rows])
        return size, size


class Kept:
    """The numbers of each example that are largest in size, and their places."""

    def __init__(self, ratio: float, crossed: Crossed) -> None:
        self.crossed = crossed
        self.width = crossed.rows(crossed.examples).shape[1]
        self.count = math.ceil(ratio * self.width)
        self.place = _place(self.width)
        self._places: Tensor | None = None

    def forget(self) -> None:
        self._places = None

    def write(self, value: Tensor) -> Tensor:
        rows = as_rows([value.detach()], [self.crossed.dim])
        # In their order, so that both ends can tell that they are different ones.
        places = rows.abs().topk(self.count, dim=1, sorted=False).indices.sort(dim=1).values
        self._places = places
        return torch.cat(
            [element_bytes(rows.gather(1, places)), element_bytes(places.to(self.place))]
        )

    def read(self, sent: Tensor, examples: int) -> Tensor:
        rows = self.crossed.rows(examples)
        shape = len(rows), self.count
        split = len(rows) * self.count * rows.itemsize
        length = split + len(rows) * self.count * self.place.itemsize
        if sent.dtype != torch.uint8 or sent.shape != (length,):
            raise ValueError(
                f"{examples} examples are {length} bytes of top-k, and not {sent.dtype} of shape "
                f"{list(sent.shape)}"
            )
        # In memory of their own, which suits their dtype.
        values = sent[:split].clone().view(rows.dtype).view(shape)
        places = sent[split:].clone().view(self.place).view(shape).long()
        last = self.width - 1
        if bool((places.diff(dim=1) <= 0).any() | (places < 0).any() | (places > last).any()):
            raise ValueError(f"the places of top-k are not ascending within 0 to {last}")
        self._places = places
        return self._spread(values, places, examples)

    def _spread(self, values: Tensor, places: Tensor, examples: int) -> Tensor:
        """The value, or the gradient, that has these numbers there, and zeros elsewhere."""
        rows = values.new_zeros(len(values), self.width).scatter_(1, places, values)
        return from_rows(rows, [self.crossed.like(examples)], [self.crossed.dim])[0]

    def write_back(self, gradient: Tensor) -> Tensor:
        assert self._places is not None
        return as_rows([gradient], [self.crossed.dim]).gather(1, self._places)

    def read_back(self, sent: Tensor, examples: int) -> Tensor:
        if self._places is None:
            raise ValueError("no values were sent to which these gradients could belong")
        rows = self.crossed.rows(examples)
        if sent.dtype != rows.dtype or sent.shape != self._places.shape:
            raise ValueError(
                f"gradients at the places of top-k are {rows.dtype} of shape "
                f"{list(self._places.shape)}, and not {sent.dtype} of shape {list(sent.shape)}"
            )
        return self._spread(sent, self._places, examples)

    def nbytes(self, examples: int) -> tuple[int, int]:
        rows = self.crossed.rows(examples)
        numbers = len(rows) * self.count
        return numbers * (rows.itemsize + self.place.itemsize), numbers * rows.itemsize


def _place(width: int) -> torch.dtype:
    """What a place among so many numbers is written as."""
    if width <= 1 << 8:
        return torch.uint8
    return torch.int16 if width <= 1 << 15 else torch.int32
