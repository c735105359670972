"""The division as data: the elements of each rank, and the messages of a step.

A *block* is a sequence of parameters of one dtype that travels as one message. Its n elements are
padded to N chunks of c = ceil(n/N) elements each, with at most N-1 elements of padding; rank r has
chunk r. A long parameter whose number of elements is divisible by N is a separate block without
padding: its gradient is sent from where it is.

Nothing here needs running ranks: a test can compute any division and its cost.
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

SEPARATE_BLOCK_ELEMENTS = 1 << 17
"""Number of elements from which on a parameter is a separate block.

The start of a message of half a megabyte costs little. With shared-memory messages a parameter is
copied in either case, unless it is so long that its gradient is computed in the buffer
(`dure.parallel.gradients_into_buckets`).
"""


class ChunkPiece(NamedTuple):
    """Run of elements of a parameter within a chunk.

    parameter[start:stop] (flat) is at chunk[at:at+stop-start].
    """

    start: int
    stop: int
    at: int


class MessagePart(NamedTuple):
    """Run of elements of a parameter in a message, parameter[start:stop].

    number: the parameter's index in its block. whole: whether the run is the whole parameter.
    """

    number: int
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True)
class ParameterBlock:
    """Sequence of parameters divided over `ranks`.

    names, shapes: of the parameters. dtype: dtype in which parameters are gathered and gradients
    travel. master: dtype in which the optimizer sees them. trained: whether they have gradients.
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
        """Index of each parameter's first element in the block."""
        return tuple(itertools.accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def elements(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.lengths)

    @cached_property
    def chunk(self) -> int:
        """Elements of a rank's chunk; the last elements may be padding."""
        return -(-self.elements // self.ranks)

    @cached_property
    def padded(self) -> int:
        """Elements of all chunks, padding included."""
        return self.chunk * self.ranks

    @property
    def alone(self) -> bool:
        """Whether the block is a single parameter without padding.

        Its chunks are then views of the parameter itself.
        """
        return len(self.names) == 1 and self.elements == self.padded

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[int, ChunkPiece], ...], ...]:
        """For each parameter, the ranks that have some of it, each with its piece."""
        return tuple(map(self._pieces_of, self.starts, self.lengths))

    def _pieces_of(self, first: int, length: int) -> tuple[tuple[int, ChunkPiece], ...]:
        """Return the ranks and pieces of a parameter with `length` elements from `first` on."""
        holders = self._holders(first, length)
        return tuple((rank, self._piece(first, length, rank)) for rank in holders)

    def parts(self, tail: int) -> list[list[tuple[int, MessagePart | None]]]:
        """Return the parts of each row of a message: a chunk, followed by `tail` numbers.

        Each part has a length, and the run of a parameter; None for padding and the trailer.
        """
        chunks: list[list[tuple[int, MessagePart | None]]] = [[] for _ in range(self.ranks)]
        for index, pieces in enumerate(self.pieces):
            for rank, (start, stop, _) in pieces:
                whole = stop - start == self.lengths[index]
                chunks[rank].append((stop - start, MessagePart(index, start, stop, whole)))
        for chunk in chunks:
            # The remainder of a row is padding and the trailer.
            rest = self.chunk + tail - sum(length for length, _ in chunk)
            if rest:
                chunk.append((rest, None))
        return chunks

    def piece(self, index: int, rank: int) -> ChunkPiece | None:
        """Return the piece of parameter `index` on `rank`; None if the rank has none."""
        return next((piece for holder, piece in self.pieces[index] if holder == rank), None)

    def _holders(self, first: int, length: int) -> range:
        return (
            # from the rank with the first element to the rank with the last element
            range(first // self.chunk, -(-(first + length) // self.chunk)) if length else range(0)
        )

    def _piece(self, first: int, length: int, rank: int) -> ChunkPiece:
        # the overlap of [first, first + length) with the chunk of this rank
        low = max(first, rank * self.chunk)
        high = min(first + length, (rank + 1) * self.chunk)
        return ChunkPiece(low - first, high - first, low - rank * self.chunk)


def blocks_of(
    parameters: Sequence[tuple[str, torch.Tensor]],
    ranks: int,
    dtypes: Sequence[torch.dtype],
    alone: int = SEPARATE_BLOCK_ELEMENTS,
) -> list[ParameterBlock]:
    """Return the blocks of a unit: long parameters separate, the others in one block per dtype.

    Frozen and trained parameters are in different blocks.

    dtypes: the dtype in which each parameter is gathered; bfloat16 with mixed precision. alone:
    number of elements from which on a parameter is long.
    """
    # in order of first appearance, which is the same on all ranks
    rows: dict[tuple[object, ...], list[int]] = {}
    for index, ((_, parameter), dtype) in enumerate(zip(parameters, dtypes, strict=True)):
        length = parameter.numel()
        # a unique key makes a long parameter a separate block
        own = index if length >= alone and length % ranks == 0 else None
        rows.setdefault((own, dtype, parameter.dtype, parameter.requires_grad), []).append(index)
    blocks = []
    for row in rows.values():
        names, tensors = zip(*(parameters[index] for index in row), strict=True)
        blocks.append(
            ParameterBlock(
                names=names,
                shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                dtype=dtypes[row[0]],
                master=tensors[0].dtype,
                trained=tensors[0].requires_grad,
                ranks=ranks,
            )
        )
    return blocks


def bytes_sent(
    blocks: Sequence[ParameterBlock], stage: Stage, tail: int, tail_width: int = 4
) -> int:
    """Return the payload bytes that a rank sends in a step, for any rank and any algorithm.

    A reduce-scatter or an all-gather of a block sends N-1 chunks. Gradients are reduced once.
    Parameters, frozen parameters included, are gathered twice within a step in stage 3, for forward
    and for backward; trained parameters are gathered once after the step in stages 1 and 2. tail:
    numbers after the chunks of the step's last message, of `tail_width` bytes each.
    """
    if not blocks or blocks[0].ranks == 1:
        return 0
    trained = sum(block.chunk * block.dtype.itemsize for block in blocks if block.trained)
    whole = sum(block.chunk * block.dtype.itemsize for block in blocks)
    gathered = 2 * whole if stage == 3 else trained
    # In stage 3 a unit is gathered for forward and again for backward: twice `whole`.
    return (blocks[0].ranks - 1) * (trained + gathered + tail * tail_width)


class ZeROMemory(NamedTuple):
    """Bytes of a rank's memory by use.

    buffers: buffers into which units are gathered; everything else stays between steps.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """Sum of all uses, in bytes."""
        return sum(self)


def memory(
    blocks: Sequence[ParameterBlock], stage: Stage, state: float = 8, buffers: int = 0
) -> ZeROMemory:
    """Return the bytes of a rank when backward has ended, padding included.

    state: bytes of the optimizer's state for each element; 8 for Adam in float32, 4 for momentum, 0
        for plain SGD.
    buffers: bytes of the units that are gathered at once in stage 3.

    In float32 with Adam and without padding: stage 1 8Ψ + 8Ψ/N, stage 2 4Ψ + 12Ψ/N, stage 3 16Ψ/N.
    If parameters are gathered in another dtype than the master's, the master counts as optimizer
    state, and the gradient of the elements that the rank updates is in the master's dtype.
    """
    parameters = gradients = optimizer = 0.0
    for block in blocks:
        mixed = block.dtype != block.master
        held = block.chunk if stage == 3 else block.padded
        # In stages 1 and 2 frozen parameters are not divided.
        parameters += held * block.dtype.itemsize if block.trained or stage == 3 else 0
        if not block.trained:
            continue
        optimizer += block.chunk * (state + (block.master.itemsize if mixed else 0))
        if stage == 1:
            # In stage 1 gradients stay whole on every rank, as autograd computes them.
            gradients += block.elements * block.dtype.itemsize
        else:
            gradients += block.chunk * block.master.itemsize
    return ZeROMemory(int(parameters), int(gradients), int(optimizer), buffers)
