"""Messages between a server and its clients other than the messages of training.

    client -> server    Hello: its first frame: its number of examples, and its keys
    server -> client    Members: the signed roster of all clients, once all have joined
    client -> server    Sealed: its head, encrypted for another client
    server -> client    Sealed: the same, to its receiver
    client -> server    Failed: the client's own code has raised
    client -> server    HeadRefused: the head that the client received is invalid
    server -> client    Final: the head at the end of the run, if the server has it

and if the head is at a client, which the server asks to measure the model:

    server -> client    Measure
    client -> server    Query: output of the head, in evaluation
    server -> client    Answer: output of the server's part
    client -> server    Measured
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from dure.split.messages import SideState


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a client, with its data and keys.

    Args:
        examples: number of training examples.
        member: its entry in the roster, as JSON.
        digest: of its initial weights.
        joins: whether its part cannot train on a batch of a single example.
        form: of the head's output, as JSON, if the head is a separate file; else empty.
        targets: form of the targets sent with the head's output, likewise.
        head: bytes of the head's weights and buffers; 0 if not stated (earlier versions).
        tests: number of test examples; -1 if not stated (earlier versions).
    """

    examples: int
    member: bytes
    digest: str
    joins: bool = False
    form: bytes = b""
    targets: bytes = b""
    head: int = 0
    tests: int = -1


class RosterMembers(msgspec.Struct, frozen=True, tag="Members"):
    """The signed roster, as JSON.

    joins: whether a last single example joins the batch before, since a part of the model cannot
    train on a single example. form: of the output of the server's part, if that is a separate file
    and the labels stay at the client.
    """

    roster: bytes
    joins: bool = False
    form: bytes = b""


class SealedHead(msgspec.Struct, frozen=True, tag="Sealed"):
    """An encrypted head for a turn.

    peer: number of the receiving client; on the way from the server, of the sending client.
    content: bytes, as uint8.
    """

    turn: int
    peer: int
    content: Tensor


class ClientFailed(msgspec.Struct, frozen=True, tag="Failed"):
    """Error of the client's own code, as far as the client shares it."""

    reason: str


class HeadRefused(msgspec.Struct, frozen=True, tag=True):
    """Refusal by a client to train with the invalid head that it received for this turn."""

    turn: int
    reason: str


class MeasureModel(msgspec.Struct, frozen=True, tag="Measure"):
    """Request to measure the model with this head, or the client's head after the turn `since`."""

    round: int
    since: int
    head: SideState | None = None


class Final(msgspec.Struct, frozen=True, tag=True):
    """Final head of the run, if the server has the newest head."""

    head: SideState


class Query(msgspec.Struct, frozen=True, tag=True):
    """Output of the head for a batch of examples, in evaluation.

    targets: leaves of the targets, if the server's own file has the loss, so that the server
    measures; of: total number of examples that the server will measure.
    """

    examples: int
    values: tuple[Tensor, ...]
    targets: list[Tensor] | None = None
    of: int = 0


class QueryAnswer(msgspec.Struct, frozen=True, tag="Answer"):
    """Output of the server's part for a query; empty if the server measures the metrics itself."""

    values: tuple[Tensor, ...]


class ModelMeasured(msgspec.Struct, frozen=True, tag="Measured"):
    """Result of a measurement.

    values: by metric; empty without test data, or if the server measures.
    """

    round: int
    values: dict[str, float]


Control = (
    Hello
    | RosterMembers
    | SealedHead
    | ClientFailed
    | HeadRefused
    | MeasureModel
    | Query
    | QueryAnswer
    | ModelMeasured
    | Final
)


ALIGNS = -1
"""Step of a `Resume` that starts with the alignment."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Request to return to the state after `step` steps; with `ALIGNS`, to the initial state."""

    turn: int
    step: int


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """Acknowledgement of `Resume`."""

    turn: int


class Aligned(msgspec.Struct, frozen=True, tag=True):
    """The party has saved the alignment with all parties."""


class SaveState(msgspec.Struct, frozen=True, tag="Keep"):
    """Request to save the state after this step, and to delete states before that of `since`."""

    step: int
    since: int


class StateSaved(msgspec.Struct, frozen=True, tag="Kept"):
    """Acknowledgement of `SaveState`."""

    step: int


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Request for the head's output on `count` rows of the test data, from `first` on."""

    first: int
    count: int


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """Output of the head for an `Evaluate`. values: (count, q, ...)."""

    first: int
    values: Tensor


PartiesControl = Resume | Resumed | Aligned | SaveState | StateSaved | Evaluate | Evaluated
