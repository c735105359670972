"""What a rank holds of a block.

It is the rank's chunk of the parameters, that of their gradients, and what the optimizer updates.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.shared_memory.pool import empty_shared
from dure.parallel.zero.away import elements_of, set_elements
from dure.parallel.zero.division import Block, Piece


class Held(NamedTuple):
    """A piece of a parameter that this rank updates.

    place: the parameter's in the block. part: what the optimizer is given; it has one dimension, or
    none for a single number.
    """

    place: int
    piece: Piece
    part: nn.Parameter


class Share:
    """Rank `rank`'s share of a block; the parameters are taken over.

    own: the chunk, in the dtype in which it is gathered. whole: where the rank has all chunks for
    good: its own copy in stages 1 and 2; in stage 3 memory that is `common` to all ranks, of which
    each writes its chunk. master: the chunk that the optimizer updates: `own`, or a copy in more
    digits. gradient: the sum that belongs to it, in the master's dtype; None before there is one.
    """

    def __init__(
        self,
        block: Block,
        parameters: Sequence[nn.Parameter],
        rank: int,
        memory: Tensor,
        common: bool = False,
    ) -> None:
        """memory: of one chunk, or of all chunks."""
        self.block = block
        self.parameters = list(parameters)
        self.rank = rank
        self.common = common
        # Whether memory is of one chunk or of all shows in its length; on one rank a chunk is all.
        self.whole = memory if block.ranks == 1 or memory.numel() > block.chunk else None
        self.own = (
            memory if self.whole is None else memory[rank * block.chunk : (rank + 1) * block.chunk]
        )
        self._places = list(zip(block.starts, block.lengths, block.shapes, strict=True))
        self.gradient: Tensor | None = None
        self._cut: Tensor | None = None  # the gradient that `_pieces` are of
        self._pieces: list[Tensor] = []
        # A master of its own costs memory, and is made only where rounding would lose small
        # updates.
        mixed = block.dtype != block.master
        self.master = torch.empty_like(self.own, dtype=block.master) if mixed else self.own
        self.take([elements_of(parameter) for parameter in parameters])
        self.held: list[Held] = []
        if block.trained:
            for index in range(len(parameters)):
                piece = block.piece(index, rank)
                if piece is not None:
                    self.held.append(
                        Held(index, piece, nn.Parameter(self.part(self.master, index, piece)))
                    )

    @staticmethod
    def of(chunk: Tensor, piece: Piece) -> Tensor:
        """A piece's elements in a chunk."""
        return chunk[piece.at : piece.at + piece.stop - piece.start]

    def part(self, chunk: Tensor, index: int, piece: Piece) -> Tensor:
        """The same as the optimizer sees it: a single number stays one."""
        elements = self.of(chunk, piece)
        return elements if self.block.shapes[index] else elements.view(())

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parameters as views of all chunks."""
        return [whole[start : start + length].view(shape) for start, length, shape in self._places]

    def install(self) -> None:
        """Makes the parameters views of `whole`."""
        assert self.whole is not None
        for parameter, view in zip(self.parameters, self.views(self.whole), strict=True):
            set_elements(parameter, view)

    def take(self, values: Sequence[Tensor]) -> None:
        """Sets the share to that of these values of the parameters, which all ranks give."""
        given = dict(zip(self.block.names, values, strict=True))
        self.fill(lambda name, start, stop: given[name].reshape(-1)[start:stop])

    @torch.no_grad()
    def fill(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Sets the share to what `read(name, start, stop)` says of elements of the parameters."""
        # so that padding is zero, whatever the memory has held
        self.master.zero_()
        for index, name in enumerate(self.block.names):
            piece = self.block.piece(index, self.rank)
            if piece is not None:
                self.of(self.master, piece).copy_(read(name, piece.start, piece.stop))
        self.round()
        # In common memory every rank writes its own chunk, and together they have written all.
        if self.whole is None or self.common:
            return
        # the padding, which the next all-gather sends along
        self.whole[self.block.elements :].zero_()
        for name, length, view in zip(
            self.block.names, self.block.lengths, self.views(self.whole), strict=True
        ):
            view.copy_(read(name, 0, length).view(view.shape))

    @torch.no_grad()
    def round(self) -> None:
        """After an update: `own` becomes what `master` is, in fewer digits."""
        if self.own is not self.master:
            self.own.copy_(self.master)

    def accumulates(self) -> bool:
        """Whether there are gradients to which those of the next pass are added."""
        return any(held.part.grad is not None for held in self.held)

    def forget_gradient(self) -> None:
        """The memory goes back, if no other object has it."""
        self.gradient = self._cut = None
        self._pieces = []

    def give_gradients(self, used: Sequence[bool]) -> None:
        """Hands the sum to the optimizer's parts, where some rank has used the parameter."""
        assert self.gradient is not None
        if self._cut is not self.gradient:  # views are cut once for memory that stays
            self._cut = self.gradient
            self._pieces = [self.part(self.gradient, held.place, held.piece) for held in self.held]
        for held, gradient in zip(self.held, self._pieces, strict=True):
            # A gradient that is there already is a view of the same sum, to which this pass has
            # been added.
            if used[held.place] and held.part.grad is None:
                held.part.grad = gradient


class Pool:
    """Buffers that are used again and again, so that no memory has to be made anew in every step.

    The smallest free buffer that is large enough is taken; if there is none, a larger one is made
    in place of the largest free one. So there are as many as were ever in use at once, and what is
    asked for again has the same view of it. shared: where other ranks can read them.
    """

    def __init__(self, device: torch.device, shared: bool = False) -> None:
        self.device = device
        self.shared = shared
        self.free: list[Tensor] = []  # by size
        self.used: dict[int, Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.before_change: Callable[[], None] = lambda: (
            None
        )  # called before a buffer is dropped, or left

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of so many elements, until it is given back, or left."""
        nbytes = elements * dtype.itemsize
        place = next(
            (place for place, buffer in enumerate(self.free) if buffer.numel() >= nbytes), None
        )
        # `free` is sorted by size, so the first that is large enough is the smallest one.
        if place is not None:
            buffer = self.free.pop(place)
        else:
            self._changes()
            # The largest free one was too small: it goes, so that the number of buffers does not
            # grow.
            del self.free[-1:]
            buffer = self._made(nbytes)
        address = buffer.data_ptr()
        self.used[address] = buffer
        # The same view again, so that what was prepared for its address can be used again.
        view = self._views.get((address, nbytes, dtype))
        if view is None:
            # A tensor that is made in inference mode could never be written to in training.
            with torch.inference_mode(False):
                view = self._views[address, nbytes, dtype] = buffer[:nbytes].view(dtype)
        return view

    def _made(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            if self.shared:
                return empty_shared(max(1, nbytes), dtype=torch.uint8)
            return torch.empty(max(1, nbytes), dtype=torch.uint8, device=self.device)

    def give(self, tensor: Tensor) -> None:
        """Takes a tensor back that `take` gave."""
        bisect.insort(self.free, self.used.pop(tensor.data_ptr()), key=Tensor.numel)

    def leave(self, tensor: Tensor) -> None:
        """A tensor that `take` gave stays with the caller."""
        self._changes()
        del self.used[tensor.data_ptr()]

    def _changes(self) -> None:
        # New memory may get the address of what is dropped: nothing that was made for that address
        # may live on.
        self._views.clear()
        self.before_change()

    @property
    def buffers(self) -> list[Tensor]:
        """All of them."""
        return [*self.free, *self.used.values()]
