"""What a rank holds of a block: its chunk of the parameters, of their gradients, and what the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.flat import views_of
from dure.parallel.zero.division import Block, Piece, Stage

Empty = Callable[[int, torch.dtype], Tensor]
"""empty(elements, dtype) is memory from which others are sent what is in it."""


class Held(NamedTuple):
    """A piece of a parameter that this rank updates. place: the parameter's in the block. part: what the
    optimizer is given: of one dimension, or none for a single number."""

    place: int
    piece: Piece
    part: nn.Parameter


class Share:
    """Rank `rank`'s share of a block; the parameters are taken over.

    own: the chunk, in the dtype in which it is gathered. whole: in stages 1 and 2, all chunks; the parameters are views
    of it. master: the chunk that the optimizer updates: `own`, or a copy in more digits. gradient: the sum that belongs
    to it, in the master's dtype; None before there is one.
    """

    def __init__(self, block: Block, parameters: Sequence[nn.Parameter], rank: int, stage: Stage, empty: Empty) -> None:
        self.block, self.parameters, self.rank = block, list(parameters), rank
        self.whole: Tensor | None = None
        self.gradient: Tensor | None = None
        mixed = block.dtype != block.master
        if stage == 3:
            self.own = empty(block.chunk, block.dtype)
        else:
            self.whole = empty(block.padded, block.dtype)
            self.own = self.whole[rank * block.chunk : (rank + 1) * block.chunk]
        self.master = torch.empty_like(self.own, dtype=block.master) if mixed else self.own
        self.take([parameter.data for parameter in parameters])
        self.held: list[Held] = []
        if block.trained:
            for index in range(len(parameters)):
                piece = block.piece(index, rank)
                if piece is not None:
                    self.held.append(Held(index, piece, nn.Parameter(self.part(self.master, index, piece))))

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
        return views_of(whole, [torch.empty(shape, device="meta") for shape in self.block.shapes])

    def install(self) -> None:
        """Makes the parameters views of `whole`, in stages 1 and 2."""
        assert self.whole is not None
        for parameter, view in zip(self.parameters, self.views(self.whole), strict=True):
            parameter.data = view

    def take(self, values: Sequence[Tensor]) -> None:
        """Sets the share to that of these values of the parameters, which all ranks give."""
        given = dict(zip(self.block.names, values, strict=True))
        self.fill(lambda name, start, stop: given[name].reshape(-1)[start:stop])

    @torch.no_grad()
    def fill(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Sets the share to what `read(name, start, stop)` says of elements of the parameters."""
        self.master.zero_()
        for index, name in enumerate(self.block.names):
            piece = self.block.piece(index, self.rank)
            if piece is not None:
                self.of(self.master, piece).copy_(read(name, piece.start, piece.stop))
        self.round()
        if self.whole is None:
            return
        self.whole[self.block.elements :].zero_()
        for name, length, view in zip(self.block.names, self.block.lengths, self.views(self.whole), strict=True):
            view.copy_(read(name, 0, length).view(view.shape))

    @torch.no_grad()
    def round(self) -> None:
        """After an update: `own` becomes what `master` is, in fewer digits."""
        if self.own is not self.master:
            self.own.copy_(self.master)

    def accumulates(self) -> bool:
        """Whether there are gradients to which those of the next pass are added."""
        return any(held.part.grad is not None for held in self.held)

    def give_gradients(self, used: Sequence[bool]) -> None:
        """Hands the sum to the optimizer's parts, where some rank has used the parameter."""
        assert self.gradient is not None
        for held in self.held:
            if used[held.place] and held.part.grad is None:
                held.part.grad = self.part(self.gradient, held.place, held.piece)


class Pool:
    """Buffers that are used again and again, so that no memory has to be made anew in every step.

    The smallest free buffer that is large enough is taken; if there is none, a larger one is made in place of the
    largest free one. So there are as many as were ever in use at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: list[Tensor] = []
        self.used: dict[int, Tensor] = {}

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        nbytes = elements * dtype.itemsize
        self.free.sort(key=Tensor.numel)
        buffer = next((buffer for buffer in self.free if buffer.numel() >= nbytes), None)
        if buffer is not None:
            self.free = [other for other in self.free if other is not buffer]
        else:
            del self.free[-1:]
            with torch.inference_mode(False):
                buffer = torch.empty(max(1, nbytes), dtype=torch.uint8, device=self.device)
        self.used[buffer.data_ptr()] = buffer
        return buffer[:nbytes].view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Takes a tensor back that `take` gave."""
        self.free.append(self.used.pop(tensor.data_ptr()))

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffer in [*self.free, *self.used.values()])
