"""What a server and its clients say to each other besides the messages of training.

    client -> server    Hello: its first frame: how many examples it has, and its keys
    server -> client    Members: the signed roster of all clients, once all have come
    client -> server    Sealed: its head, for another client, which the server cannot read
    server -> client    Sealed: the same, for whom it is
    client -> server    Failed: its own code has raised

and where the head is with a client, which the server asks to measure the model:

    server -> client    Measure
    client -> server    Query: what leaves the head, in evaluation
    server -> client    Answer: what leaves the server's part
    client -> server    Measured
"""

from __future__ import annotations

import msgspec
from torch import Tensor


class Hello(msgspec.Struct, frozen=True, tag=True):
    """examples: of the client's. member: its entry in the roster, as JSON. digest: of the head that
    it begins with."""

    examples: int
    member: bytes
    digest: str


class Members(msgspec.Struct, frozen=True, tag=True):
    """The roster, as JSON."""

    roster: bytes


class Sealed(msgspec.Struct, frozen=True, tag=True):
    """A head for a turn. peer: the number of the client for whom it is; on the way from the server,
    of the one from whom. content: bytes, as uint8."""

    turn: int
    peer: int
    content: Tensor


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What the client's own code raised, as far as the client shares it."""

    reason: str


class Measure(msgspec.Struct, frozen=True, tag=True):
    """The model is to be measured, with what the client knew after the turn `since`."""

    round: int
    since: int


class Query(msgspec.Struct, frozen=True, tag=True):
    """What leaves the head for so many examples, in evaluation."""

    examples: int
    values: tuple[Tensor, ...]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What leaves the server's part for them."""

    values: tuple[Tensor, ...]


class Measured(msgspec.Struct, frozen=True, tag=True):
    """values: by the names of metrics; empty without test data."""

    round: int
    values: dict[str, float]


Control = Hello | Members | Sealed | Failed | Measure | Query | Answer | Measured
