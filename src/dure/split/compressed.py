"""Messages at the cut in fewer bytes: before a node of whatever kind, an interpreter.

    what the node says     ->  values and gradients as a coder writes them
    what is said to it     ->  read, and refused by name where it makes no sense

So neither the client nor the server knows of it, and what they compute with is what has arrived: the
tail goes forward from the values as they are read, the head backward from the gradients as they
are read. A message keeps its type; of its values, those that may have a gradient are coded
(`dure.split.coding`), and masks, whole numbers and targets stay as they are. Heads that are handed
over, and gradients of heads, are not at the cut, and travel as they are.

A defence comes first: it has changed what leaves a node before that is coded, and what a code makes
of it tells nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from dure.collectives.compression import Cast, Compression, Int8, NoCompression, TopK
from dure.errors import LossNotFiniteError
from dure.fleet.virtual import Node
from dure.parallel.pipeline.cut import CutModel
from dure.split.batching import crossings, values_at
from dure.split.coding import Coder, Crossed, Kept, Rounded
from dure.split.messages import (
    Envelope,
    Gradients,
    Message,
    OutputGradients,
    Outputs,
    Smashed,
)

Cut = Sequence[Crossed | None]
"""The values that cross a cut, in their order; None for one that travels as it is."""


def check_compression(compression: Compression) -> None:
    """Raises ValueError for a compression that is none of values at a cut."""
    if not isinstance(compression, NoCompression | Cast | Int8 | TopK):
        raise ValueError(
            f"compression is {compression}, but at a cut there are none, bfloat16, float16, int8 "
            f"and top-k"
        )


def cuts_of(cut: CutModel) -> list[Cut]:
    """What crosses the cuts of a model.

    Raises ValueError where a value belongs to a whole batch, and where nothing has a gradient.
    """
    cuts = [_cut(cut, boundary) for boundary in range(cut.stages - 1)]
    if not any(value is not None for values in cuts for value in values):
        raise ValueError(
            "nothing that crosses the cut has a gradient, and all of it would travel as it is: "
            "leave compression out, or let the head learn"
        )
    return cuts


def _cut(cut: CutModel, boundary: int) -> Cut:
    found: list[Crossed | None] = []
    for value, crossing in zip(
        values_at(cut, boundary, cut.examples), crossings(cut, boundary), strict=True
    ):
        if not value.differentiable:
            found.append(None)
            continue
        # Those without a dimension of examples were refused.
        assert crossing.dim is not None
        found.append(Crossed(value.shape, value.dtype, crossing.dim, cut.examples))
    return found


def coder(compression: Compression, crossed: Crossed | None) -> Coder | None:
    """A new coder of a value; None where it travels as it is."""
    if crossed is None or not compression.compresses:
        return None
    if isinstance(compression, TopK):
        kept = Kept(compression.ratio, crossed)
        return kept if kept.count < kept.width else None
    return Rounded(compression, crossed)


class Exchange:
    """What a node exchanges with one other, batch after batch."""

    def __init__(self, compression: Compression, cuts: Sequence[Cut]) -> None:
        self.cuts = [[coder(compression, value) for value in cut] for cut in cuts]
        self._differentiable = [
            [own for own, value in zip(coders, cut, strict=True) if value is not None]
            for coders, cut in zip(self.cuts, cuts, strict=True)
        ]
        self._examples = 0
        self._when = ""

    def written(self, message: Message) -> Message:
        """As it is sent."""
        if isinstance(message, Smashed):
            self._begin(message)
        coders = self._coders(message)
        if coders is None:
            return message
        back = isinstance(message, Gradients | OutputGradients)
        values = tuple(
            value if one is None else one.write_back(value) if back else one.write(value)
            for one, value in zip(coders, message.values, strict=True)
        )
        return msgspec.structs.replace(message, values=values)

    def read(self, sender: str, message: Message) -> Message:
        """As it was before it was sent.

        Raises ValueError for what nobody can have sent, and LossNotFiniteError for values that are
        none.
        """
        if isinstance(message, Smashed):
            self._begin(message)
        coders = self._coders(message)
        if coders is None:
            return message
        back = isinstance(message, Gradients | OutputGradients)
        try:
            values = self._read(coders, message.values, back)
        except ValueError as error:
            raise ValueError(
                f"{sender} sends {type(message).__name__} that cannot be read: {error}"
            ) from error
        for one, value in zip(coders, values, strict=True):
            if one is not None and bool(value.isnan().any()):
                raise LossNotFiniteError(math.nan, sender, self._when)
        return msgspec.structs.replace(message, values=values)

    def _begin(self, message: Smashed) -> None:
        """A batch begins."""
        self._examples = message.examples
        self._when = f"step {message.step + 1} of turn {message.turn + 1}"
        if message.step == 0:
            for coders in self.cuts:
                for one in coders:
                    if one is not None:
                        one.forget()

    def _coders(self, message: Message) -> Sequence[Coder | None] | None:
        """Of the values of a message; None of one that has none at a cut."""
        if isinstance(message, Smashed):
            return self.cuts[0]
        if isinstance(message, Gradients):
            return self._differentiable[0]
        if isinstance(message, Outputs):
            return self.cuts[-1]
        if isinstance(message, OutputGradients):
            return self._differentiable[-1]
        return None

    def _read(
        self, coders: Sequence[Coder | None], sent: Sequence[Tensor], back: bool
    ) -> tuple[Tensor, ...]:
        if len(sent) != len(coders):
            raise ValueError(f"there are {len(sent)} values, and {len(coders)} cross here")
        if self._examples < 1:
            raise ValueError(f"the batch has {self._examples} examples")
        with torch.no_grad():
            return tuple(
                value
                if one is None
                else one.read_back(value, self._examples)
                if back
                else one.read(value, self._examples)
                for one, value in zip(coders, sent, strict=True)
            )


class Compressed:
    """A node, and what interprets between it and the others.

    exchange: makes a new exchange, one for each other node.
    """

    def __init__(self, node: Node, exchange: Callable[[], Exchange]) -> None:
        self.node = node
        self._exchange = exchange
        self._with: dict[str, Exchange] = {}

    @property
    def wake(self) -> float:
        return self.node.wake

    def tick(self, now: float) -> list[Envelope]:
        return self._written(self.node.tick(now))

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message. Raises what the exchange raises, and what the node does."""
        message = self._of(sender).read(sender, message)
        return self._written(self.node.receive(sender, message, now))

    def _written(self, said: list[Envelope]) -> list[Envelope]:
        return [(receiver, self._of(receiver).written(message)) for receiver, message in said]

    def _of(self, name: str) -> Exchange:
        found = self._with.get(name)
        if found is None:
            found = self._with[name] = self._exchange()
        return found
