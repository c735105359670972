"""What a client, the server and other clients say to each other.

A step of a client, with one cut and with two:

    client -> server    Smashed: the values at the cut, and with one cut the targets
    server -> client    Outputs: the values at the second cut                       (two cuts)
    client -> server    OutputGradients: the gradients there                        (two cuts)
    server -> client    Gradients: those at the first cut

and around it

    server -> client    Turn: it may train, with this head or one that comes from a client
    client -> server    Ended: it has trained; its head, where the server hands heads over
    server -> client    Pass: to whom it hands its head
    client -> client    Handed: the head

Tensors are the payload; the rest of a message is a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

SERVER = "server"
"""The name of the server."""


def client(number: int) -> str:
    """The name of a client."""
    return f"client {number}"


class Own(msgspec.Struct, frozen=True):
    """What a side of the cut has learned: the weights that it trains, its buffers that forward
    passes change, and what its optimizer remembers, by parameter.

    groups: the settings that the optimizer's steps have changed, for each of its parameter groups;
    empty for an optimizer that begins anew; None where an earlier version of dure has not kept
    them. shared: what the optimizer remembers of no single parameter, by name.
    """

    weights: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    optimizer: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...] | None = None
    shared: Mapping[str, Any] = {}


class Turn(msgspec.Struct, frozen=True, tag=True):
    """A client may train.

    number: of the turn, which no other has, nor the same one tried again. round: of all clients.
    first: the step on the way of all, from which schedules count, of the turn's first. steps: how
    many it makes. until: how many all make, where heads make one step. taken: steps that the client
    has made before. since: the newest of its turns that counts, after which it goes on; -1: it has
    had none.
    head: None where the client has it, or, where it `comes`, another client sends it.
    brings: whether the head goes to the server at the end.
    """

    number: int
    round: int
    first: int
    steps: int
    until: int
    taken: int
    since: int
    head: Own | None
    comes: bool = False
    brings: bool = False


class Smashed(msgspec.Struct, frozen=True, tag=True):
    """What leaves the head for a batch of so many examples.

    step: of the turn, counted from 0. counted: what the loss counts in the batch, or what stands in
    for it. targets: their leaves; None where they stay with the client.
    """

    turn: int
    step: int
    examples: int
    counted: float
    values: tuple[Tensor, ...]
    targets: Any


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What leaves the server's part, where the end of the model is with the client.

    share: of the joint batch, that the client's has.
    """

    step: int
    values: tuple[Tensor, ...]
    share: float


class OutputGradients(msgspec.Struct, frozen=True, tag=True):
    """Their gradients. missed: which of them got none, as bits; loss: of the client's batch."""

    turn: int
    step: int
    values: tuple[Tensor, ...]
    missed: int
    loss: float
    counted: float


class Gradients(msgspec.Struct, frozen=True, tag=True):
    """The gradients of what has left the head. missed, loss, counted: as in `OutputGradients`.

    share: of the joint batch, that the client's has.
    """

    step: int
    values: tuple[Tensor, ...]
    missed: int
    loss: float
    counted: float
    share: float = 1.0


class HeadGradients(msgspec.Struct, frozen=True, tag=True):
    """Those of a client's head; None of a weight that got none."""

    turn: int
    step: int
    values: tuple[Tensor | None, ...]


class HeadSum(msgspec.Struct, frozen=True, tag=True):
    """The sum of the gradients of all heads."""

    step: int
    values: tuple[Tensor | None, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A client has done its turn. head: None where it keeps it, or hands it on itself."""

    turn: int
    head: Own | None


class Pass(msgspec.Struct, frozen=True, tag=True):
    """To whom a client hands the head that it had after the turn `since`, for a turn."""

    turn: int
    since: int
    to: str


class Handed(msgspec.Struct, frozen=True, tag=True):
    """The head of the turn before."""

    turn: int
    head: Own


Message = (
    Turn
    | Smashed
    | Outputs
    | OutputGradients
    | Gradients
    | HeadGradients
    | HeadSum
    | Ended
    | Pass
    | Handed
)
Envelope = tuple[str, Message]
"""(to whom, what)."""
