"""Messages of split learning between clients and the server, and among clients.

A step of a client, with one cut and with two:

    client -> server    Smashed: the values at the cut, and with one cut the targets
    server -> client    Outputs: the values at the second cut                       (two cuts)
    client -> server    OutputGradients: their gradients                            (two cuts)
    server -> client    Gradients: of the values at the first cut

and around it

    server -> client    Turn: the client may train, with this head or a head from a client
    client -> server    Ended: the turn is done; its head, if the server passes heads on
    server -> client    Pass: name of the client that gets the head
    client -> client    Handed: the head

Tensors are the payload; the rest of a message is a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

SERVER = "server"
"""Name of the server."""


def client(number: int) -> str:
    """Return the name of a client."""
    return f"client {number}"


class SideState(msgspec.Struct, frozen=True):
    """State of a side of the cut: trained weights, buffers that passes change, and optimizer.

    optimizer: state by parameter. groups: the settings that the optimizer's steps have changed, for
    each of its parameter groups; empty for a new optimizer; None from an earlier version of dure,
    which did not save them. shared: optimizer state that belongs to no single parameter, by name.
    """

    weights: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    optimizer: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...] | None = None
    shared: Mapping[str, Any] = {}


class Turn(msgspec.Struct, frozen=True, tag=True):
    """Permission for a client to train.

    Args:
        number: of the turn; unique, also among retries.
        round: of all clients.
        first: step of the run, over all clients, of the turn's first step; schedules count from it.
        steps: number of steps of the turn.
        until: number of steps that all clients make, if heads make the same step.
        taken: number of steps that the client has made before.
        since: the client's newest turn that counts, whose state it starts from; -1: none.
        head: None if the client has the head, or if it `comes` from another client.
        comes: whether another client sends the head.
        brings: whether the head goes to the server at the end.
    """

    number: int
    round: int
    first: int
    steps: int
    until: int
    taken: int
    since: int
    head: SideState | None
    comes: bool = False
    brings: bool = False


class Smashed(msgspec.Struct, frozen=True, tag=True):
    """Output of the head for a batch of `examples` examples.

    step: of the turn, counted from 0. counted: expected count of the batch in the loss. targets:
    leaves of the targets; None if they stay at the client.
    """

    turn: int
    step: int
    examples: int
    counted: float
    values: tuple[Tensor, ...]
    targets: Any


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Output of the server's part, if the end of the model is at the client.

    share: the client's share of the joint batch.
    """

    step: int
    values: tuple[Tensor, ...]
    share: float


class OutputGradients(msgspec.Struct, frozen=True, tag=True):
    """Gradients of `Outputs`.

    missed: bit mask of the values without a gradient. loss, counted: of the client's batch.
    """

    turn: int
    step: int
    values: tuple[Tensor, ...]
    missed: int
    loss: float
    counted: float


class Gradients(msgspec.Struct, frozen=True, tag=True):
    """Gradients of the head's output.

    missed, loss, counted: as in `OutputGradients`. share: the client's share of the joint batch.
    """

    step: int
    values: tuple[Tensor, ...]
    missed: int
    loss: float
    counted: float
    share: float = 1.0


class HeadGradients(msgspec.Struct, frozen=True, tag=True):
    """Gradients of a client's head; None for a weight without a gradient."""

    turn: int
    step: int
    values: tuple[Tensor | None, ...]


class HeadSum(msgspec.Struct, frozen=True, tag=True):
    """Sum of the gradients of all heads."""

    step: int
    values: tuple[Tensor | None, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A client has finished its turn. head: None if the client keeps it or passes it on."""

    turn: int
    head: SideState | None


class Pass(msgspec.Struct, frozen=True, tag=True):
    """Request to send the head after the turn `since` to the client `to`, for the turn `turn`."""

    turn: int
    since: int
    to: str


class HeadHandover(msgspec.Struct, frozen=True, tag="Handed"):
    """Head of the turn before, from a client to another."""

    turn: int
    head: SideState


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
    | HeadHandover
)
Envelope = tuple[str, Message]
"""(receiver, message)."""
