"""What a server and its clients say to each other besides the messages of training.

    client -> server    Hello: its first frame: how many examples it has, and its keys
    server -> client    Members: the signed roster of all clients, once all have come
    client -> server    Sealed: its head, for another client, which the server cannot read
    server -> client    Sealed: the same, for whom it is
    client -> server    Failed: its own code has raised
    client -> server    HeadRefused: the head that it was handed cannot be
    server -> client    Final: the head at the end of the run, where the server has it

and where the head is with a client, which the server asks to measure the model:

    server -> client    Measure
    client -> server    Query: what leaves the head, in evaluation
    server -> client    Answer: what leaves the server's part
    client -> server    Measured
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from dure.split.messages import Own


class Hello(msgspec.Struct, frozen=True, tag=True):
    """What a client says of itself.

    examples: how many it has. member: its entry in the roster, as JSON. digest: of the weights with
    which it begins. joins: whether its part cannot train on one example alone. form, targets: of
    what leaves the head, and of the targets that go with it, as JSON, where the head is a file of
    its own. head: bytes of the head's weights and buffers; 0: it does not say (earlier versions).
    tests: how many test examples it has; -1: it does not say (earlier versions).
    """

    examples: int
    member: bytes
    digest: str
    joins: bool = False
    form: bytes = b""
    targets: bytes = b""
    head: int = 0
    tests: int = -1


class Members(msgspec.Struct, frozen=True, tag=True):
    """The roster, as JSON.

    joins: whether a last example that is left over joins the batch before, since some part of the
    model cannot train on one alone. form: of what leaves the server's part, where that is a file of
    its own and the labels stay with the client.
    """

    roster: bytes
    joins: bool = False
    form: bytes = b""


class Sealed(msgspec.Struct, frozen=True, tag=True):
    """A head for a turn. peer: the number of the client for whom it is; on the way from the server,
    of the one from whom. content: bytes, as uint8."""

    turn: int
    peer: int
    content: Tensor


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What the client's own code raised, as far as the client shares it."""

    reason: str


class HeadRefused(msgspec.Struct, frozen=True, tag=True):
    """The client does not train with the head that it was handed for this turn: it cannot be."""

    turn: int
    reason: str


class Measure(msgspec.Struct, frozen=True, tag=True):
    """The model is to be measured: with this head, or the one after the turn `since`."""

    round: int
    since: int
    head: Own | None = None


class Final(msgspec.Struct, frozen=True, tag=True):
    """The head that the run has come to, where the server has the newest."""

    head: Own


class Query(msgspec.Struct, frozen=True, tag=True):
    """What leaves the head for so many examples, in evaluation.

    targets: the leaves of theirs, where the loss is a file of the server's, which so measures them
    itself; of: how many it will have measured in the end.
    """

    examples: int
    values: tuple[Tensor, ...]
    targets: list[Tensor] | None = None
    of: int = 0


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What leaves the server's part for them; nothing where the server measures it itself."""

    values: tuple[Tensor, ...]


class Measured(msgspec.Struct, frozen=True, tag=True):
    """values: by the names of metrics; empty without test data, or where the server measures."""

    round: int
    values: dict[str, float]


Control = (
    Hello | Members | Sealed | Failed | HeadRefused | Measure | Query | Answer | Measured | Final
)
