"""Messages at the cut in fewer bytes: before a node of whatever kind, an interpreter.

    what the node says     ->  values and gradients as a coder writes them
    what is said to it     ->  read, and refused by name where it makes no sense

So neither client nor server knows of it, and what they compute with is what has arrived: the tail
goes forward from the values as they are read, the head backward from the gradients as they are
read. A message keeps its type; of its values, those that may have a gradient are coded
(`dure.split.coding`), and masks, whole numbers and targets stay as they are. Heads that are handed
over, and gradients of heads, are not at the cut, and travel as they are.

A defence comes first: it has changed what leaves a node before that is coded, and what a code makes
of it tells nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import msgspec
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

AtCut = Smashed | Outputs | OutputGradients | Gradients
"""The messages whose values are coded."""
Cut = Sequence[Crossed | None]
"""The values that cross a cut, in their order; None for one that travels as it is."""
Coders = Sequence[Coder | None]
"""Of these values."""

_MOST_EXAMPLES = 1 << 31
"""Of a batch, as a message may say; what it then has to hold is another matter."""


def check_compression(compression: Compression) -> None:
    """Raises ValueError for a compression that is none of values at a cut."""
    if not isinstance(compression, NoCompression | Cast | Int8 | TopK):
        raise ValueError(
            f"compression is {compression}, but at a cut there are none, bfloat16, float16, int8 "
            f"and top-k"
        )


def cuts_of(cut: CutModel, training: bool = True) -> list[Cut]:
    """What crosses the cuts of a model, in training or in evaluation.

    Raises ValueError where a value belongs to a whole batch, and where nothing has a gradient.
    """
    cuts = [_cut(cut, boundary, training) for boundary in range(cut.stages - 1)]
    if not any(value is not None for values in cuts for value in values):
        raise ValueError(
            "nothing that crosses the cut has a gradient, and all of it would travel as it is: "
            "leave compression out, or let the head learn"
        )
    return cuts


def _cut(cut: CutModel, boundary: int, training: bool) -> Cut:
    found: list[Crossed | None] = []
    for value, crossing in zip(
        values_at(cut, boundary, cut.examples, training),
        crossings(cut, boundary, training),
        strict=True,
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


def exchange_of(compression: Compression, cut: CutModel) -> Callable[[], Exchange] | None:
    """Makes what a node exchanges with another; None where everything travels as it is.

    Raises as `cuts_of`.
    """
    if not compression.compresses:
        return None
    cuts = cuts_of(cut)
    if all(coder(compression, value) is None for values in cuts for value in values):
        return None
    return partial(Exchange, compression, cuts)


def message_bytes(
    compression: Compression, cut: CutModel, boundary: int, examples: int
) -> tuple[int, int]:
    """Bytes of so many examples that cross the cut after a stage: of values, of gradients."""
    if not compression.compresses:
        return cut.message_bytes(boundary, examples)
    sizes: list[tuple[int, int]] = []
    for value, crossed in zip(
        values_at(cut, boundary, examples), _cut(cut, boundary, training=True), strict=True
    ):
        one = coder(compression, crossed)
        plain = value.nbytes, value.nbytes if value.differentiable else 0
        sizes.append(plain if one is None else one.nbytes(examples))
    return sum(there for there, _ in sizes), sum(back for _, back in sizes)


class Exchange:
    """What a node exchanges with one other, batch after batch."""

    def __init__(self, compression: Compression, cuts: Sequence[Cut]) -> None:
        self.cuts = [[coder(compression, value) for value in cut] for cut in cuts]
        self._back = [
            [own for own, value in zip(coders, cut, strict=True) if value is not None]
            for coders, cut in zip(self.cuts, cuts, strict=True)
        ]
        self._examples = 0
        self._when = ""

    def written(self, message: Message) -> Message:
        """As it is sent."""
        if not isinstance(message, AtCut):
            return message
        coders = self._coders(message)
        back = isinstance(message, Gradients | OutputGradients)
        values = tuple(
            value if one is None else one.write_back(value) if back else one.write(value)
            for one, value in zip(coders, message.values, strict=True)
        )
        return msgspec.structs.replace(message, values=values)

    def read(self, sender: str, message: Message) -> Message:
        """As it was before it was sent, but for what is lost.

        Raises ValueError for what nobody can have written, and LossNotFiniteError for what is no
        number.
        """
        if not isinstance(message, AtCut):
            return message
        coders = self._coders(message)
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

    def _coders(self, message: AtCut) -> Coders:
        """Of the values of a message."""
        if isinstance(message, Smashed):
            self._begin(message)
            return self.cuts[0]
        if isinstance(message, Outputs):
            return self.cuts[-1]
        # No gradient comes back for the others.
        return self._back[0 if isinstance(message, Gradients) else -1]

    def _begin(self, message: Smashed) -> None:
        """A batch begins."""
        self._examples = message.examples
        self._when = f"step {message.step + 1} of turn {message.turn + 1}"
        if message.step == 0:
            for one in chain.from_iterable(self.cuts):
                if one is not None:
                    one.forget()

    def _read(self, coders: Coders, sent: Sequence[Tensor], back: bool) -> tuple[Tensor, ...]:
        if len(sent) != len(coders):
            raise ValueError(f"there are {len(sent)} values, and {len(coders)} cross here")
        if not 0 < self._examples <= _MOST_EXAMPLES:
            raise ValueError(f"the batch has {self._examples} examples")
        return tuple(self._value(one, each, back) for one, each in zip(coders, sent, strict=True))

    def _value(self, one: Coder | None, sent: Tensor, back: bool) -> Tensor:
        if one is None:
            return sent
        return one.read_back(sent, self._examples) if back else one.read(sent, self._examples)


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
