"""The division as data: which rank holds which elements, and what a step then sends.

A *block* is a row of parameters of one dtype that travels as one message. Its n elements are filled
up to N chunks of c = ceil(n/N) elements each, at most N-1 elements of padding; rank r holds chunk
r. A long parameter whose elements N divides is a block of its own and needs no padding: its
gradient is sent from where it is.

Nothing here knows ranks that run: a test can ask for any division, and what it costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

Stage = Literal[1, 2, 3]

ALONE = 1 << 17
"""From so many elements on a parameter is a block of its own: a message of half a megabyte costs
little to begin. Where messages lie in shared memory a parameter is copied there either way, unless
it is so long that its gradient is computed there (`dure.parallel.direct`)."""


class Piece(NamedTuple):
    """A run of elements of a parameter within a chunk.

    parameter[start:stop] (flat) lies at chunk[at:at+stop-start].
    """

    start: int
    stop: int
    at: int


class Part(NamedTuple):
    """A run of elements of a parameter in a message, parameter[start:stop].

    number: the parameter's in its block. whole: whether that is all of it.
    """

    number: int
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True)
class Block:
    """A row of parameters divided over `ranks`.

    names, shapes: of the parameters. dtype: in which they are gathered and their gradients travel.
    master: in which the optimizer sees them. trained: whether they have gradients.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    master: torch.dtype
    trained: bool
    ranks: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the block."""
        return tuple(itertools.accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def elements(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.lengths)

    @cached_property
    def chunk(self) -> int:
        """Elements that a rank holds, the last ones perhaps of padding."""
        return -(-self.elements // self.ranks)

    @cached_property
    def padded(self) -> int:
        """Elements of all chunks, padding included."""
        return self.chunk * self.ranks

    @property
    def alone(self) -> bool:
        """Whether it is one parameter without padding.

        What it is divided into then lies in the parameter itself.
        """
        return len(self.names) == 1 and self.elements == self.padded

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[int, Piece], ...], ...]:
        """For each parameter the ranks that hold some of it, with what they hold."""
        return tuple(map(self._pieces_of, self.starts, self.lengths))

    def _pieces_of(self, first: int, length: int) -> tuple[tuple[int, Piece], ...]:
        """Of a parameter of so many elements that begins at `first` of the block."""
        holders = self._holders(first, length)
        return tuple((rank, self._piece(first, length, rank)) for rank in holders)

    def parts(self, tail: int) -> list[list[tuple[int, Part | None]]]:
        """What each row of a message consists of: a chunk, and `tail` numbers after it.

        Each part has a length, and the run of a parameter that it is; None for padding and tails.
        """
        chunks: list[list[tuple[int, Part | None]]] = [[] for _ in range(self.ranks)]
        for index, pieces in enumerate(self.pieces):
            for rank, (start, stop, _) in pieces:
                whole = stop - start == self.lengths[index]
                chunks[rank].append((stop - start, Part(index, start, stop, whole)))
        for chunk in chunks:
            # What is left of a row is padding and the place of the tail.
            rest = self.chunk + tail - sum(length for length, _ in chunk)
            if rest:
                chunk.append((rest, None))
        return chunks

    def piece(self, index: int, rank: int) -> Piece | None:
        """What `rank` holds of parameter `index`; None for nothing."""
        return next((piece for holder, piece in self.pieces[index] if holder == rank), None)

    def _holders(self, first: int, length: int) -> range:
        return (
            # from the rank that has the first element to the one that has the last
            range(first // self.chunk, -(-(first + length) // self.chunk)) if length else range(0)
        )

    def _piece(self, first: int, length: int, rank: int) -> Piece:
        # the part of the parameter [first, first + length) that lies in the chunk of this rank
        low = max(first, rank * self.chunk)
        high = min(first + length, (rank + 1) * self.chunk)
        return Piece(low - first, high - first, low - rank * self.chunk)


def blocks_of(
    parameters: Sequence[tuple[str, torch.Tensor]],
    ranks: int,
    dtypes: Sequence[torch.dtype],
    alone: int = ALONE,
) -> list[Block]:
    """The blocks of a unit's parameters: long ones alone, the others in one row for each dtype.

    Frozen ones are apart.

    dtypes: in which each parameter is gathered; its own, or a shorter one under mixed precision.
    alone: elements of long ones.
    """
    # in order of first appearance, which is the same on all ranks
    rows: dict[tuple[object, ...], list[int]] = {}
    for index, ((_, parameter), dtype) in enumerate(zip(parameters, dtypes, strict=True)):
        length = parameter.numel()
        # a key of its own keeps a long parameter out of the rows
        own = index if length >= alone and length % ranks == 0 else None
        rows.setdefault((own, dtype, parameter.dtype, parameter.requires_grad), []).append(index)
    blocks = []
    for row in rows.values():
        names, tensors = zip(*(parameters[index] for index in row), strict=True)
        blocks.append(
            Block(
                names=names,
                shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                dtype=dtypes[row[0]],
                master=tensors[0].dtype,
                trained=tensors[0].requires_grad,
                ranks=ranks,
            )
        )
    return blocks


def bytes_sent(blocks: Sequence[Block], stage: Stage, tail: int, tail_width: int = 4) -> int:
    """Payload bytes that a rank sends in a step, the same on every rank and with every algorithm.

    A reduce-scatter or an all-gather of a block sends N-1 chunks. Gradients are reduced once;
    parameters are gathered once after the step in stages 1 and 2, and twice within it, for forward
    and for backward, in stage 3, frozen ones among them. tail: numbers after the chunks of the
    step's last message, of `tail_width` bytes each.
    """
    if not blocks or blocks[0].ranks == 1:
        return 0
    trained = sum(block.chunk * block.dtype.itemsize for block in blocks if block.trained)
    whole = sum(block.chunk * block.dtype.itemsize for block in blocks)
    gathered = 2 * whole if stage == 3 else trained
    # In stage 3 a unit is gathered for forward and once more for backward: twice `whole`.
    return (blocks[0].ranks - 1) * (trained + gathered + tail * tail_width)


class Memory(NamedTuple):
    """Bytes that a rank holds.

    buffers: those into which units are gathered; all else stays between steps.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


def memory(blocks: Sequence[Block], stage: Stage, state: float = 8, buffers: int = 0) -> Memory:
    """The formula, padding included: what a rank holds when backward has ended.

    state: bytes of the optimizer's state for each element; 8 for Adam in float32, 4 for momentum, 0
        for plain SGD.
    buffers: bytes of the units that are gathered at once in stage 3.

    In float32 with Adam and without padding: stage 1 8Ψ + 8Ψ/N, stage 2 4Ψ + 12Ψ/N, stage 3 16Ψ/N.
    Where parameters are gathered in another dtype than their master's, the master counts as
    optimizer state, and the gradient of what the rank updates is in the master's dtype.
    """
    parameters = gradients = optimizer = 0.0
    for block in blocks:
        mixed = block.dtype != block.master
        held = block.chunk if stage == 3 else block.padded
        # In stages 1 and 2 frozen parameters are not taken over: they stay where they were.
        parameters += held * block.dtype.itemsize if block.trained or stage == 3 else 0
        if not block.trained:
            continue
        optimizer += block.chunk * (state + (block.master.itemsize if mixed else 0))
        if stage == 1:
            # In stage 1 gradients stay whole on every rank, as autograd makes them.
            gradients += block.elements * block.dtype.itemsize
        else:
            gradients += block.chunk * block.master.itemsize
    return Memory(int(parameters), int(gradients), int(optimizer), buffers)
