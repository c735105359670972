"""Compression of the messages at the cut, in training and in evaluation: a wrapper around a node.

    messages of the node   ->  values and gradients are encoded
    messages to the node   ->  decoded, and refused with the sender's name if invalid

So client and server do not depend on the compression, and compute with the received values: the
tail goes forward from the decoded values, the head backward from the decoded gradients. A message
keeps its type; values that may have a gradient are encoded (`dure.split.coding`), and masks,
integers and targets are sent unchanged. Heads, and gradients of heads, do not cross the cut, and
are sent unchanged.

A defence comes first: the values are protected before they are encoded, and a code of protected
values reveals nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from dure.collectives.compression import Cast, Compression, Int8, NoCompression, TopK
from dure.errors import LossNotFiniteError
from dure.fleet.virtual_network import Node
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.trace import leaves_of
from dure.split.batching import crossings, values_at
from dure.split.coding import CodecCoder, Coder, CutShape, TopKCoder
from dure.split.messages import (
    Envelope,
    Gradients,
    Message,
    OutputGradients,
    Outputs,
    Smashed,
)

AtCut = Smashed | Outputs | OutputGradients | Gradients
"""Messages whose values are encoded."""
CutShapes = Sequence[CutShape | None]
"""Values that cross a cut, in order; None for a value that is sent unchanged."""
Coders = Sequence[Coder | None]
"""Coders of these values."""

_MOST_EXAMPLES = 1 << 31
"""Maximum number of examples of a batch; the length of the code is checked separately."""


def check_compression(compression: Compression) -> None:
    """Raise ValueError for a compression that does not apply to values at a cut."""
    if not isinstance(compression, NoCompression | Cast | Int8 | TopK):
        raise ValueError(
            f"compression is {compression}, but a cut supports none, bfloat16, float16, int8 and "
            "top-k"
        )


def cuts_of(cut: CutModel, training: bool = True) -> list[CutShapes]:
    """Return the values that cross the cuts of a model, in training or in evaluation.

    Raises ValueError for a differentiable value of a whole batch, or if no value has a gradient.
    """
    cuts = [_cut(cut, boundary, training) for boundary in range(cut.stages - 1)]
    if not any(value is not None for values in cuts for value in values):
        raise ValueError(
            "no tensor at the cut has a gradient, so nothing would be compressed: leave "
            "compression out, or use a head with trainable parameters"
        )
    return cuts


def _cut(cut: CutModel, boundary: int, training: bool) -> CutShapes:
    found: list[CutShape | None] = []
    for value, crossing in zip(
        values_at(cut, boundary, cut.examples, training),
        crossings(cut, boundary, training),
        strict=True,
    ):
        if not value.differentiable:
            found.append(None)
            continue
        # `crossings` has refused differentiable values without a dimension of examples.
        assert crossing.dim is not None
        found.append(CutShape(value.shape, value.dtype, crossing.dim, cut.examples))
    return found


def coder(compression: Compression, crossed: CutShape | None) -> Coder | None:
    """Return a new coder of a value; None if the value is sent unchanged."""
    if crossed is None or not compression.compresses:
        return None
    if isinstance(compression, TopK):
        kept = TopKCoder(compression.ratio, crossed)
        return kept if kept.count < kept.width else None
    return CodecCoder(compression, crossed)


def exchange_of(compression: Compression, cut: CutModel) -> Callable[[], CutCompression] | None:
    """Return a factory of exchanges; None if everything is sent unchanged.

    Raises the errors of `cuts_of`.
    """
    if not compression.compresses:
        return None
    cuts = cuts_of(cut)
    if all(coder(compression, value) is None for values in cuts for value in values):
        return None
    return partial(CutCompression, compression, cuts)


def message_bytes(
    compression: Compression, cut: CutModel, boundary: int, examples: int
) -> tuple[int, int]:
    """Return the bytes at the cut after a stage for a batch: of values, and of gradients."""
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


class CutCompression:
    """Compression between a node and another node, batch after batch."""

    def __init__(self, compression: Compression, cuts: Sequence[CutShapes]) -> None:
        self.cuts = [[coder(compression, value) for value in cut] for cut in cuts]
        self._back = [
            [own for own, value in zip(coders, cut, strict=True) if value is not None]
            for coders, cut in zip(self.cuts, cuts, strict=True)
        ]
        self._examples = 0
        self._when = ""

    def written(self, message: Message) -> Message:
        """Return the encoded message."""
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
        """Return the decoded message.

        Raises ValueError for an invalid code, and LossNotFiniteError for values with NaN.
        """
        if not isinstance(message, AtCut):
            return message
        coders = self._coders(message)
        back = isinstance(message, Gradients | OutputGradients)
        try:
            values = self._read(coders, message.values, back)
        except ValueError as error:
            raise ValueError(
                f"{sender} sends {type(message).__name__} that cannot be decoded: {error}"
            ) from error
        for one, value in zip(coders, values, strict=True):
            if one is not None and bool(value.isnan().any()):
                raise LossNotFiniteError(math.nan, sender, self._when)
        return msgspec.structs.replace(message, values=values)

    def _coders(self, message: AtCut) -> Coders:
        """Return the coders of the values of a message."""
        if isinstance(message, Smashed):
            self._begin(message)
            return self.cuts[0]
        if isinstance(message, Outputs):
            return self.cuts[-1]
        # Only differentiable values have gradients.
        return self._back[0 if isinstance(message, Gradients) else -1]

    def _begin(self, message: Smashed) -> None:
        """Begin a batch; the first batch of a turn resets the coders."""
        self._examples = message.examples
        self._when = f"step {message.step + 1} of turn {message.turn + 1}"
        if message.step == 0:
            for one in chain.from_iterable(self.cuts):
                if one is not None:
                    one.forget()

    def _read(self, coders: Coders, sent: Sequence[Tensor], back: bool) -> tuple[Tensor, ...]:
        if len(sent) != len(coders):
            raise ValueError(f"there are {len(sent)} values, but {len(coders)} cross the cut")
        if not 0 < self._examples <= _MOST_EXAMPLES:
            raise ValueError(f"the batch has {self._examples} examples")
        return tuple(self._value(one, each, back) for one, each in zip(coders, sent, strict=True))

    def _value(self, one: Coder | None, sent: Tensor, back: bool) -> Tensor:
        if one is None:
            return sent
        return one.read_back(sent, self._examples) if back else one.read(sent, self._examples)


class CompressedNode:
    """Wrapper around a node that compresses its messages.

    exchange: makes a new exchange, for each other node.
    """

    def __init__(self, node: Node, exchange: Callable[[], CutCompression]) -> None:
        self.node = node
        self._exchange = exchange
        self._with: dict[str, CutCompression] = {}

    @property
    def wake(self) -> float:
        return self.node.wake

    def tick(self, now: float) -> list[Envelope]:
        return self._written(self.node.tick(now))

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the node's replies, encoded. Raises the errors of the exchange and of the node."""
        message = self._of(sender).read(sender, message)
        return self._written(self.node.receive(sender, message, now))

    def _written(self, said: list[Envelope]) -> list[Envelope]:
        return [(receiver, self._of(receiver).written(message)) for receiver, message in said]

    def _of(self, name: str) -> CutCompression:
        found = self._with.get(name)
        if found is None:
            found = self._with[name] = self._exchange()
        return found


class CompressedCutModel(nn.Module):
    """Module with the interface of the model, for evaluation.

    Raises ValueError for a model that cannot be cut there.
    """

    def __init__(self, cut: CutModel, compression: Compression) -> None:
        super().__init__()
        self.model = cut.model
        self.cut = cut
        # The stream is unused: in evaluation no operation draws random numbers.
        self._stream = RandomStream(0, carried=False)
        self._coders = [
            [coder(compression, value) for value in values]
            for values in cuts_of(cut, training=False)
        ]

    def forward(self, inputs: Any) -> Any:
        leaves = leaves_of(inputs)
        examples = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        values: list[Tensor] = []
        for stage in range(self.cut.stages):
            if stage > 0:
                values = self.crossing(stage - 1, values, examples)
            program = self.cut.program(stage, examples, False, self._stream, None)
            values = list(program.module(*values, *(leaves[index] for index in program.inputs)))
        return tree_unflatten(values, self.cut.structure(examples, False))

    def crossing(self, boundary: int, values: Sequence[Tensor], examples: int) -> list[Tensor]:
        """Return the values that arrive after a cut, compressed and decompressed."""
        return [
            value if one is None else one.read(one.write(value), examples)
            for one, value in zip(self._coders[boundary], values, strict=True)
        ]
