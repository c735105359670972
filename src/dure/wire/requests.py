"""What a server and a client of a network say to each other besides tensors: small JSON bodies.

    POST  /v1/enrol           Enrol -> Enrolled     here is my key, and the token that lets me in
    POST  /v1/check-in        CheckIn -> Welcome    who I am, what I would train; how we go on
    POST  /v1/next            Ready -> Word         what am I to do? waits until there is something
    POST  /v1/watch           Watch -> Watched      is my work still wanted? waits while it is
    GET   /v1/tensors/DIGEST?from=BYTE              tensors by their stream's digest, from a byte on
    POST  /v1/uploads         Reserve -> Reserved   I would send so many bytes with this digest
    PATCH /v1/uploads/UPLOAD?offset=BYTE
                              bytes -> Reserved     a part, from an offset on; complete at the end
    POST  /v1/failures        Failed                there will be no update, since my code raised
    POST  /v1/measured        MeasuredThis          how good a model is on what I hold out
    POST  /v1/ready           Holds                 my update is ready, and stays with me
    POST  /v1/answers         AnswerTo              what I say to a step of a protocol

The last two are of runs whose updates stay with their clients (secure aggregation): there an update
is neither reserved nor sent. What `Word.say` asks is answered by `AnswerTo`; tensors that belong to
an answer are sent before, as an update is elsewhere.

Clients ask and the server answers; whatever the server has to say waits for a `next`. Every request
may be sent again: the answer is the same, and nothing happens twice. Nothing here is code, and
every field is checked for its type before anything is done with it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

VERSION = 2
"""Of this list. A server answers clients of its own version and of the one before. Since 2 updates
may stay with their clients."""

MOST_BODY = 1 << 20
"""Bytes of a JSON body, at most; tensors travel elsewhere."""

MOST_SAID = 700 << 10
"""Bytes of what is said in a step of a protocol, at most: in base64 it fits into a body."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Of examples, bytes and the like: every number of them is exact as a float, and fits into SQLite.
"""


class RequestError(ValueError):
    """A body is not what it has to be."""


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """Base of all bodies. Unknown fields are ignored: the next version may have more."""


class Machine(Said, frozen=True):
    """What decides whether two machines compute the same bits.

    capability: of the processor, as torch names it. engine: of local training.
    """

    torch: str
    capability: str
    engine: str
    threads: int


class Trains(Said, frozen=True):
    """What a site would train, to be compared with what the server serves.

    forms: name to (dtype, shape) of each tensor that travels. frozen: digest of the weights that
    are not trained, of which the site has its own; frozen_bytes: of their stream. buffers: which of
    the tensors are no weights. loss, optimizer: how they call themselves. metrics, features: names.
    asks: what the task asks of training besides, such as {"clip_norm": "1.0"}, by name.
    """

    forms: dict[str, tuple[str, list[int]]]
    frozen: str | None = None
    frozen_bytes: int = 0
    loss: str = ""
    optimizer: str = ""
    buffers: list[str] = []
    metrics: list[str] = []
    features: list[str] = []
    asks: dict[str, str] = {}


class CheckIn(Said, frozen=True):
    """A client is there.

    name: how it calls itself. examples: how many it trains on. held_out: how many it measures with.
    wants: the number that it would have among the clients, where it cares. trains: None for a
    client with a training loop of its own.
    looks: it only wants to know what is served, and takes no place.
    """

    version: int
    name: str
    examples: Count
    held_out: Count = 0
    wants: int | None = None
    trains: Trains | None = None
    machine: Machine | None = None
    looks: bool = False


class Welcome(Said, frozen=True):
    """A client is known.

    client: its number, below `clients`. strategy: as run folders have it. heartbeat: seconds after
    which a silent connection is taken for lost. patience: seconds that a `next` may wait. differs:
    in what the client's machine computes differently, in words. roster: of the clients, as its
    owner has signed it (`wire.owners_roster`), in JSON; empty where there is none. holds: updates
    stay with their clients, which then say of themselves neither how many examples they have nor
    anything else.
    """

    version: int
    run: str
    client: int
    clients: int
    strategy: dict[str, Any]
    seed: int
    trains: Trains
    machine: Machine
    heartbeat: float
    patience: float
    differs: list[str] = []
    holds: bool = False
    roster: str = ""


class Outcome(Said, frozen=True):
    """What became of an update: whether it counts, and if not, why."""

    ticket: int
    kept: bool
    reason: str = ""


class Train(Said, frozen=True):
    """An assignment. tensors: the digest of weights, buffers and extras. left: seconds until the
    deadline; None without. holds: the update stays with the client."""

    ticket: int
    round: int
    turn: int
    tensors: str
    bytes: int
    left: float | None = None
    holds: bool = False


class SayThis(Said, frozen=True):
    """A step of a protocol on an update that stays with its client.

    asking: names this question, and its answer says so too: a server that was started again asks
    anew. body: the protocol's own message. wants: (dtype, shape) of the tensors of the answer.
    """

    ticket: int
    stage: int
    asking: str
    body: bytes
    wants: list[tuple[str, list[int]]] = []


class MeasureThis(Said, frozen=True):
    """A model: to be measured on what the client holds out, or to be kept."""

    round: int
    tensors: str
    bytes: int


class Word(Said, frozen=True):
    """What a client is told: outcomes first, then something to do.

    say: a step of a protocol, which comes before other work. over: the run has ended, for this
    reason. final: its last model, for whoever keeps the newest.
    """

    outcomes: list[Outcome] = []
    train: Train | None = None
    measure: MeasureThis | None = None
    say: SayThis | None = None
    over: str | None = None
    final: MeasureThis | None = None


class Ready(Said, frozen=True):
    """A client has nothing to do. confirmed: tickets of outcomes that it has written down."""

    confirmed: list[Count] = []


class Watch(Said, frozen=True):
    ticket: Count


class Watched(Said, frozen=True):
    """wanted: whether the update would still count. over: the run has ended, for this reason."""

    wanted: bool
    reason: str = ""
    over: str | None = None


class Reserve(Said, frozen=True):
    """An update is to be sent: all of it but its tensors.

    bytes, digest: of the stream of tensors. seconds: that the training took. asking: these are the
    tensors of the answer to that question, and not an update; then nothing else is said here.
    steps: of the optimizer; 0 where the client does not say.
    """

    ticket: Count
    bytes: Count
    digest: str
    examples: Count
    samples: Count
    loss: float
    counted: float | None = None
    failure: str | None = None
    seconds: float = 0.0
    metrics: dict[str, float] = {}
    asking: str = ""
    steps: Count = 0


class Reserved(Said, frozen=True):
    """upload: its number. offset: how many bytes lie there. part: the most that are taken at once.
    complete: all are there, and the update is written down."""

    upload: str
    offset: int
    part: int
    complete: bool = False


class Failed(Said, frozen=True):
    """The client's own code raised. message: only where the site shares it."""

    ticket: Count
    kind: str
    file: str = ""
    line: Count = 0
    message: str = ""


class MeasuredThis(Said, frozen=True):
    """What a client has measured, as `Measured` of `dure.protocol.messages` has it for many.

    values: of each metric, None where it has none. examples: with how many. sums, forms: by which a
    metric over the examples of all clients is known. failure: why something is missing.
    """

    round: Count
    values: dict[str, float | None] = {}
    examples: dict[str, Count] = {}
    sums: dict[str, list[float | None]] = {}
    forms: dict[str, str] = {}
    failure: str = ""


class Holds(Said, frozen=True):
    """The update of a ticket is there, and stays with its client. Nothing else is said of it."""

    ticket: Count


class AnswerTo(Said, frozen=True):
    """The answer to a step of a protocol; `SayThis` has its fields.

    body: None where the client is not in the protocol any more. failure: the kind of the error,
    where its code does not go on with it.
    """

    ticket: Count
    stage: Count
    asking: str
    body: bytes | None = None
    failure: str = ""


class Refusal(Said, frozen=True):
    """The body of every answer that refuses: why, and what to do."""

    error: str


class Enrol(Said, frozen=True):
    """A client brings its key; this request alone is not signed.

    token: of an invitation. key: public, as `wire.signatures` writes it. proof: of the private one,
    by `wire.signatures.prove`. name: how it wants to be called, and wants: the number that it would
    have, where it cares.
    """

    token: str
    key: str
    proof: str
    name: str = ""
    wants: int | None = None


class Enrolled(Said, frozen=True):
    """client: its number, below `clients`. name: as the server has it."""

    client: int
    clients: int
    name: str


Body = TypeVar("Body", bound=Said)


def to_json(said: Said) -> bytes:
    """The body. Numbers that are not finite become null, which no field of a number takes."""
    return msgspec.json.encode(said)


def from_json(body: bytes | bytearray, kind: type[Body]) -> Body:
    """The inverse of `to_json`. Raises RequestError for anything else."""
    if len(body) > MOST_BODY:
        raise RequestError(f"the body has {len(body)} bytes, and may have {MOST_BODY}")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no {kind.__name__}: {error}") from error
