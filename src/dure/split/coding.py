"""Coding of a value that crosses a cut, and of its gradient on the way back, in fewer bytes.

    cast       a^ = C(a)                                    g^ = C(g)
    int8       a^ = C(a)                                    g^ = C(g + e),  e <- g + e - g^
    top-k:R    a^ = a at the k = ⌈R d⌉ places of an         g^ = g at these places, else 0
               example where |a| is largest, else 0

The tail goes forward from a^, and g is the gradient with respect to a^. For B examples of d numbers
of b bytes:

               bytes there         bytes back
    cast       2 B d               2 B d
    int8       B d + 4 B           B d + 4 B        8 B in float64
    top-k:R    k B (b + i)         k B b            i = 1 for up to 256 numbers, 2 for up to 32768,
                                                    else 4; uncompressed, B d b, if k = d

All coding is done example by example, along the dimension that counts examples: the code of an
example does not depend on the other examples of the batch. The code of a value is a single tensor:
uint8, of a length that both sides know; for gradients at places, the numbers themselves.

Codecs with memory (int8) have error feedback for gradients: place i of a batch adds the error of
the batch before at place i. So the received values at a place add up, over the steps, to the sum of
the true values, less the last error: the common part of all examples' gradients is only delayed,
and an example's own part gets noise of half a unit at most. e is reset when a turn begins, since
other clients have trained the head since then, and when a batch has another shape. No error
survives a round.

Values have no error feedback: the error of an example says nothing of the next example. AQ-SGD
sends the change of an example since the epoch before; both ends have to store the values of all
examples, and the server has to know the identity of each example. Top-k needs no error feedback:
only numbers that the tail has received have a gradient, and all of it is sent.

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


class CutShape(NamedTuple):
    """Shape of a value that crosses a cut.

    shape: for `examples` examples, which dimension `dim` counts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    examples: int

    def like(self, examples: int) -> Tensor:
        """Return a value for this number of examples, on the meta device."""
        shape = list(self.shape)
        shape[self.dim] = shape[self.dim] * examples // self.examples
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def rows(self, examples: int) -> Tensor:
        """Return that value as a matrix of real numbers, a row per example, on the meta device."""
        return as_rows([self.like(examples)], [self.dim])


class Coder(Protocol):
    """Coder at an end of a cut, with the state of the batch and of error feedback."""

    def write(self, value: Tensor) -> Tensor:
        """Return the code of a value."""

    def read(self, sent: Tensor, examples: int) -> Tensor:
        """Return the decoded value of `examples` examples. Raises ValueError if invalid."""

    def write_back(self, gradient: Tensor) -> Tensor:
        """Return the code of the gradient for the value that was read last."""

    def read_back(self, sent: Tensor, examples: int) -> Tensor:
        """Return the gradient for the value that was written last. Raises ValueError if invalid."""

    def forget(self) -> None:
        """Reset the state, when a turn begins."""

    def nbytes(self, examples: int) -> tuple[int, int]:
        """Return the bytes of a value's code, and of its gradient's code."""


class CodecCoder:
    """Coder by a codec, with error feedback for gradients if the codec has memory."""

    def __init__(self, compression: Compression, crossed: CutShape) -> None:
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
        # Allocate by the received bytes, not by the number of examples that a message claims.
        if sent.numel() < like.numel():
            raise ValueError(f"{sent.numel()} bytes are too few for {like.numel()} numbers")
        return self.compression.decode(sent, [torch.empty_like(like, device=sent.device)])[0]

    def write_back(self, gradient: Tensor) -> Tensor:
        rows = as_rows([gradient], [self.crossed.dim])
        if not self.compression.remembers:
            return self.compression.encode([rows])
        if self._lost is not None and self._lost.shape == rows.shape:
            rows = rows + self._lost
        # The error against the decoded code, which is what the other side computes with.
        sent = self.compression.encode([rows])
        self._lost = rows - self._decoded(sent, rows)
        return sent

    def read_back(self, sent: Tensor, examples: int) -> Tensor:
        return self.read(sent, examples)

    def nbytes(self, examples: int) -> tuple[int, int]:
        rows = torch.empty_like(self.crossed.rows(examples), device="cpu")
        size = self.compression.payload_bytes([rows])
        return size, size


class TopKCoder:
    """Coder of the largest absolute values of each example, and their places (top-k)."""

    def __init__(self, ratio: float, crossed: CutShape) -> None:
        self.crossed = crossed
        self.width = crossed.rows(crossed.examples).shape[1]
        self.count = math.ceil(ratio * self.width)
        self.place = _place(self.width)
        self._places: Tensor | None = None

    def forget(self) -> None:
        self._places = None

    def write(self, value: Tensor) -> Tensor:
        rows = as_rows([value.detach()], [self.crossed.dim])
        # Sorted, so that the reader can check that the places are distinct.
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
                f"{examples} examples have to be {length} bytes of top-k, not {sent.dtype} of "
                f"shape {list(sent.shape)}"
            )
        # Cloned, since a view of another dtype needs aligned memory.
        values = sent[:split].clone().view(rows.dtype).view(shape)
        places = sent[split:].clone().view(self.place).view(shape).long()
        last = self.width - 1
        if bool((places.diff(dim=1) <= 0).any() | (places < 0).any() | (places > last).any()):
            raise ValueError(f"the places of top-k are not ascending within 0 to {last}")
        self._places = places
        return self._spread(values, places, examples)

    def _spread(self, values: Tensor, places: Tensor, examples: int) -> Tensor:
        """Return a value or gradient with these numbers at these places, and zeros elsewhere."""
        rows = values.new_zeros(len(values), self.width).scatter_(1, places, values)
        return from_rows(rows, [self.crossed.like(examples)], [self.crossed.dim])[0]

    def write_back(self, gradient: Tensor) -> Tensor:
        assert self._places is not None
        return as_rows([gradient], [self.crossed.dim]).gather(1, self._places)

    def read_back(self, sent: Tensor, examples: int) -> Tensor:
        if self._places is None:
            raise ValueError("these gradients do not belong to any values that were sent")
        rows = self.crossed.rows(examples)
        if sent.dtype != rows.dtype or sent.shape != self._places.shape:
            raise ValueError(
                f"gradients at the places of top-k have to be {rows.dtype} of shape "
                f"{list(self._places.shape)}, not {sent.dtype} of shape {list(sent.shape)}"
            )
        return self._spread(sent, self._places, examples)

    def nbytes(self, examples: int) -> tuple[int, int]:
        rows = self.crossed.rows(examples)
        numbers = len(rows) * self.count
        return numbers * (rows.itemsize + self.place.itemsize), numbers * rows.itemsize


def _place(width: int) -> torch.dtype:
    """Return the dtype for a place among `width` numbers."""
    if width <= 1 << 8:
        return torch.uint8
    return torch.int16 if width <= 1 << 15 else torch.int32
