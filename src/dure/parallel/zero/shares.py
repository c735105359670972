"""A rank's share of a block: its chunk of the parameters, of the gradients, and the master copy."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.shared_memory.pool import empty_shared
from dure.parallel.zero.partition_layout import ChunkPiece, ParameterBlock
from dure.parallel.zero.partitioned_parameters import elements_of, set_elements


class OptimizerPiece(NamedTuple):
    """Piece of a parameter that this rank updates.

    place: the parameter's index in the block. part: the tensor that the optimizer updates; it has
    one dimension, or none for a parameter of shape ().
    """

    place: int
    piece: ChunkPiece
    part: nn.Parameter


class ParameterShare:
    """Share of a block on rank `rank`, which takes over the parameters.

    own: the chunk, in the dtype in which it is gathered. whole: memory of all chunks that stays
    allocated: a private copy in stages 1 and 2; in stage 3 memory that is `common` to all ranks, to
    which each rank writes its chunk. master: the chunk that the optimizer updates: `own`, or a copy
    with higher precision. gradient: the sum for the chunk, in the master's dtype; None before the
    first sum. memory: elements for one chunk, or for all chunks.
    """

    def __init__(
        self,
        block: ParameterBlock,
        parameters: Sequence[nn.Parameter],
        rank: int,
        memory: Tensor,
        common: bool = False,
    ) -> None:
        """Fill the share from the parameters.

        Args:
            block: The block.
            parameters: Parameters of the block, in order.
            rank: This rank.
            memory: Elements for one chunk, or for all chunks.
            common: Whether all ranks share `memory`.
        """
        self.block = block
        self.parameters = list(parameters)
        self.rank = rank
        self.common = common
        # The length shows whether memory is for one chunk or for all; on one rank both are equal.
        self.whole = memory if block.ranks == 1 or memory.numel() > block.chunk else None
        self.own = (
            memory if self.whole is None else memory[rank * block.chunk : (rank + 1) * block.chunk]
        )
        self._places = list(zip(block.starts, block.lengths, block.shapes, strict=True))
        self.gradient: Tensor | None = None
        self._cut: Tensor | None = None  # the gradient that `_pieces` are views of
        self._pieces: list[Tensor] = []
        # A separate master costs memory, and is created only if rounding would lose small updates.
        mixed = block.dtype != block.master
        self.master = torch.empty_like(self.own, dtype=block.master) if mixed else self.own
        self.take([elements_of(parameter) for parameter in parameters])
        self.held: list[OptimizerPiece] = []
        if block.trained:
            for index in range(len(parameters)):
                piece = block.piece(index, rank)
                if piece is not None:
                    self.held.append(
                        OptimizerPiece(
                            index, piece, nn.Parameter(self.part(self.master, index, piece))
                        )
                    )

    @staticmethod
    def of(chunk: Tensor, piece: ChunkPiece) -> Tensor:
        """Return the elements of a piece in a chunk."""
        return chunk[piece.at : piece.at + piece.stop - piece.start]

    def part(self, chunk: Tensor, index: int, piece: ChunkPiece) -> Tensor:
        """Return the elements of a piece for the optimizer, in shape () for a single number."""
        elements = self.of(chunk, piece)
        return elements if self.block.shapes[index] else elements.view(())

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return the parameters as views of all chunks."""
        return [whole[start : start + length].view(shape) for start, length, shape in self._places]

    def install(self) -> None:
        """Make the parameters views of `whole`."""
        assert self.whole is not None
        for parameter, view in zip(self.parameters, self.views(self.whole), strict=True):
            set_elements(parameter, view)

    def take(self, values: Sequence[Tensor]) -> None:
        """Set the share from whole values of the parameters, which are given on all ranks."""
        given = dict(zip(self.block.names, values, strict=True))
        self.fill(lambda name, start, stop: given[name].reshape(-1)[start:stop])

    @torch.no_grad()
    def fill(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Set the share from `read(name, start, stop)`, which returns elements of a parameter."""
        # so that padding is zero
        self.master.zero_()
        for index, name in enumerate(self.block.names):
            piece = self.block.piece(index, self.rank)
            if piece is not None:
                self.of(self.master, piece).copy_(read(name, piece.start, piece.stop))
        self.round()
        # In common memory every rank writes its own chunk.
        if self.whole is None or self.common:
            return
        # the padding, which the next all-gather sends too
        self.whole[self.block.elements :].zero_()
        for name, length, view in zip(
            self.block.names, self.block.lengths, self.views(self.whole), strict=True
        ):
            view.copy_(read(name, 0, length).view(view.shape))

    @torch.no_grad()
    def round(self) -> None:
        """Round `master` to `own` after an update, if their dtypes differ."""
        if self.own is not self.master:
            self.own.copy_(self.master)

    def accumulates(self) -> bool:
        """Return whether there are gradients to which the gradients of the next pass are added."""
        return any(held.part.grad is not None for held in self.held)

    def forget_gradient(self) -> None:
        """Release the memory of the gradient."""
        self.gradient = self._cut = None
        self._pieces = []

    def give_gradients(self, used: Sequence[bool]) -> None:
        """Set the gradients of the optimizer's parts to views of the sum.

        used: for each parameter, whether any rank used it; gradients of other parameters stay None.
        """
        assert self.gradient is not None
        if self._cut is not self.gradient:  # views are cut once for memory that stays
            self._cut = self.gradient
            self._pieces = [self.part(self.gradient, held.place, held.piece) for held in self.held]
        for held, gradient in zip(self.held, self._pieces, strict=True):
            # An existing gradient is a view of the same sum, to which this pass has been added.
            if used[held.place] and held.part.grad is None:
                held.part.grad = gradient


class BufferPool:
    """Reused buffers, so that a step allocates no memory.

    The smallest free buffer that is large enough is taken; if there is none, a larger buffer is
    allocated in place of the largest free buffer. There are therefore as many buffers as were ever
    in use at the same time, and a repeated request returns the same view. shared: whether other
    ranks can read the buffers.
    """

    def __init__(self, device: torch.device, shared: bool = False) -> None:
        self.device = device
        self.shared = shared
        self.free: list[Tensor] = []  # by size
        self.used: dict[int, Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.before_change: Callable[[], None] = lambda: (
            None
        )  # called before a buffer leaves the pool

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of `elements` elements, in use until `give` or `leave`."""
        nbytes = elements * dtype.itemsize
        place = next(
            (place for place, buffer in enumerate(self.free) if buffer.numel() >= nbytes), None
        )
        # `free` is sorted by size, so the first buffer that is large enough is the smallest.
        if place is not None:
            buffer = self.free.pop(place)
        else:
            self._changes()
            # The largest free buffer is too small: it is dropped, so that the number of buffers
            # does not grow.
            del self.free[-1:]
            buffer = self._made(nbytes)
        address = buffer.data_ptr()
        self.used[address] = buffer
        # The same view again, so that rows prepared for its address can be reused.
        view = self._views.get((address, nbytes, dtype))
        if view is None:
            # A tensor that is created in inference mode could not be written to in training.
            with torch.inference_mode(False):
                view = self._views[address, nbytes, dtype] = buffer[:nbytes].view(dtype)
        return view

    def _made(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            if self.shared:
                return empty_shared(max(1, nbytes), dtype=torch.uint8)
            return torch.empty(max(1, nbytes), dtype=torch.uint8, device=self.device)

    def give(self, tensor: Tensor) -> None:
        """Return a tensor of `take` to the pool."""
        bisect.insort(self.free, self.used.pop(tensor.data_ptr()), key=Tensor.numel)

    def leave(self, tensor: Tensor) -> None:
        """Remove a tensor of `take` from the pool; its memory is not reused."""
        self._changes()
        del self.used[tensor.data_ptr()]

    def _changes(self) -> None:
        # New memory may get the address of a dropped buffer: views and rows for that address must
        # not remain.
        self._views.clear()
        self.before_change()

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers, free and used."""
        return [*self.free, *self.used.values()]
