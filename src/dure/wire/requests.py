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
may be sent again: the answer is the same, and nothing happens twice.

Nothing here is code. Every number is an order to whoever gets it, so the type of each field says
its range, and a body with a value beyond it is refused before anything is done (`from_json`). What
a value has to be beside others (the number of a client below the number of clients) is checked with
it. What only the receiver can know (whether a ticket is its own, how long an update is, what its
site allows) the receiver checks: `worlds.network.client.agreement`, `worlds.network.server`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec

VERSION = 2
"""Of this list. A server answers clients of its own version and of the one before. Since 2 updates
may stay with their clients."""

MOST_BODY = 1 << 20
"""Bytes of a JSON body, at most; tensors travel elsewhere."""

MOST_SAID = 700 << 10
"""Bytes of what is said in a step of a protocol, at most: in base64 it fits into a body."""


MOST_CLIENTS = 1 << 20
"""Clients of a run over a network, at most: a site makes a list of them."""

MOST_THREADS = 1024
"""Threads with which a client may be told to compute, at most."""

MOST_HEARTBEAT = 3600.0
"""Seconds of a heartbeat, at most."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Of examples, bytes and the like: every number of them is exact as a float, and fits into SQLite.
"""

ClientNumber = Annotated[int, msgspec.Meta(ge=0, lt=MOST_CLIENTS)]
AnyClient = Annotated[int, msgspec.Meta(ge=-1, lt=MOST_CLIENTS)]
"""The number of a client; -1 for one that only looks."""

Clients = Annotated[int, msgspec.Meta(ge=1, le=MOST_CLIENTS)]
Cohort = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Loss = Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""SHA-256, in hexadecimal digits."""

RunId = Annotated[str, msgspec.Meta(pattern=r"\A\w[\w.-]{0,99}\Z")]
"""The id of a run, which becomes part of the names of files."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
Line = Annotated[str, msgspec.Meta(max_length=16_384)]
Stage = Annotated[int, msgspec.Meta(ge=0, le=255)]
"""Of a protocol."""

Asking = Annotated[str, msgspec.Meta(max_length=64)]
"""The name of a question."""

Spoken = Annotated[bytes, msgspec.Meta(max_length=MOST_SAID)]
"""A protocol's own message."""

Dtype = Annotated[str, msgspec.Meta(max_length=32)]
Shape = Annotated[list[Count], msgspec.Meta(max_length=64)]


class RequestError(ValueError):
    """A body is not what it has to be."""


class RangeError(RequestError):
    """A body is of the right kind, and a value in it is beyond its range, or of another type."""


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """Base of all bodies. Unknown fields are ignored: the next version may have more."""


class Machine(Said, frozen=True):
    """What decides whether two machines compute the same bits.

    capability: of the processor, as torch names it. engine: of local training.
    """

    torch: Name
    capability: Name
    engine: Name
    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)]


class Trains(Said, frozen=True):
    """What a site would train, to be compared with what the server serves.

    forms: name to (dtype, shape) of each tensor that travels. frozen: digest of the weights that
    are not trained, of which the site has its own; frozen_bytes: of their stream. buffers: which of
    the tensors are no weights. loss, optimizer: how they call themselves. metrics, features: names.
    asks: what the task asks of training besides, such as {"clip_norm": "1.0"}, by name.
    """

    forms: dict[str, tuple[Dtype, Shape]]
    frozen: Digest | None = None
    frozen_bytes: Count = 0
    loss: str = ""
    optimizer: str = ""
    buffers: list[str] = []
    metrics: list[str] = []
    features: list[str] = []
    asks: dict[str, str] = {}

    def __post_init__(self) -> None:
        _check_elements(self.forms.values())


class CheckIn(Said, frozen=True):
    """A client is there.

    name: how it calls itself. examples: how many it trains on. held_out: how many it measures with.
    wants: the number that it would have among the clients, where it cares. trains: None for a
    client with a training loop of its own.
    looks: it only wants to know what is served, and takes no place. smallest_cohort: the fewest
    clients of which a new model may be made where an update of this one is in it.
    """

    version: Count
    name: Name
    examples: Count
    held_out: Count = 0
    wants: ClientNumber | None = None
    trains: Trains | None = None
    machine: Machine | None = None
    looks: bool = False
    smallest_cohort: Cohort = 1


class Welcome(Said, frozen=True):
    """A client is known.

    client: its number, below `clients`. strategy: as run folders have it. heartbeat: seconds after
    which a silent connection is taken for lost. patience: seconds that a `next` may wait. differs:
    in what the client's machine computes differently, in words. roster: of the clients, as its
    owner has signed it (`wire.owners_roster`), in JSON; empty where there is none. holds: updates
    stay with their clients, which then say of themselves neither how many examples they have nor
    anything else. smallest_cohort: the server combines no fewer updates than so many clients'; 0 of
    a server that does not know of it.
    """

    version: Count
    run: RunId
    client: AnyClient
    clients: Clients
    strategy: dict[str, Any]
    seed: Seed
    trains: Trains
    machine: Machine
    heartbeat: Annotated[float, msgspec.Meta(ge=0.001, le=MOST_HEARTBEAT)]
    patience: Annotated[float, msgspec.Meta(ge=0.001, le=10 * MOST_HEARTBEAT)]
    differs: list[Line] = []
    holds: bool = False
    roster: str = ""
    smallest_cohort: Count = 0

    def __post_init__(self) -> None:
        _check_number(self.client, self.clients)


class Outcome(Said, frozen=True):
    """What became of an update: whether it counts, and if not, why."""

    ticket: Count
    kept: bool
    reason: Line = ""


class Train(Said, frozen=True):
    """An assignment. tensors: the digest of weights, buffers and extras. left: seconds until the
    deadline; None without. holds: the update stays with the client. smallest_cohort: the update is
    combined with those of so many clients in all, or not at all."""

    ticket: Count
    round: Count
    turn: Count
    tensors: Digest
    bytes: Count
    left: Seconds | None = None
    holds: bool = False
    smallest_cohort: Cohort = 1


class SayThis(Said, frozen=True):
    """A step of a protocol on an update that stays with its client.

    asking: names this question, and its answer says so too: a server that was started again asks
    anew. body: the protocol's own message. wants: (dtype, shape) of the tensors of the answer.
    """

    ticket: Count
    stage: Stage
    asking: Asking
    body: Spoken
    wants: Annotated[list[tuple[Dtype, Shape]], msgspec.Meta(max_length=64)] = []

    def __post_init__(self) -> None:
        _check_elements(self.wants)


class MeasureThis(Said, frozen=True):
    """A model: to be measured on what the client holds out, or to be kept."""

    round: Count
    tensors: Digest
    bytes: Count


class Word(Said, frozen=True):
    """What a client is told: outcomes first, then something to do.

    say: a step of a protocol, which comes before other work. over: the run has ended, for this
    reason. final: its last model, for whoever keeps the newest.
    """

    outcomes: list[Outcome] = []
    train: Train | None = None
    measure: MeasureThis | None = None
    say: SayThis | None = None
    over: Line | None = None
    final: MeasureThis | None = None


class Ready(Said, frozen=True):
    """A client has nothing to do. confirmed: tickets of outcomes that it has written down."""

    confirmed: list[Count] = []


class Watch(Said, frozen=True):
    ticket: Count


class Watched(Said, frozen=True):
    """wanted: whether the update would still count. over: the run has ended, for this reason."""

    wanted: bool
    reason: Line = ""
    over: Line | None = None


class Reserve(Said, frozen=True):
    """An update is to be sent: all of it but its tensors.

    bytes, digest: of the stream of tensors. seconds: that the training took. asking: these are the
    tensors of the answer to that question, and not an update; then nothing else is said here.
    steps: of the optimizer; 0 where the client does not say.
    """

    ticket: Count
    bytes: Count
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    examples: Count
    samples: Count
    loss: Loss
    counted: Loss | None = None
    failure: str | None = None
    seconds: Loss = 0.0
    metrics: dict[str, float] = {}
    asking: Asking = ""
    steps: Count = 0


class Reserved(Said, frozen=True):
    """upload: its number. offset: how many bytes lie there. part: the most that are taken at once.
    complete: all are there, and the update is written down."""

    upload: Name
    # Whoever sends the update compares them with its size.
    offset: int
    part: int
    complete: bool = False


class Failed(Said, frozen=True):
    """The client's own code raised. message: only where the site shares it."""

    ticket: Count
    kind: Line
    file: Line = ""
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
    stage: Stage
    asking: Asking
    body: Spoken | None = None
    failure: Line = ""


class Refusal(Said, frozen=True):
    """The body of every answer that refuses: why, and what to do."""

    error: str


class Enrol(Said, frozen=True):
    """A client brings its key; this request alone is not signed.

    token: of an invitation. key: public, as `wire.signatures` writes it. proof: of the private one,
    by `wire.signatures.prove`. name: how it wants to be called, and wants: the number that it would
    have, where it cares.
    """

    token: Name
    key: Name
    proof: Name
    name: Name = ""
    wants: ClientNumber | None = None


class Enrolled(Said, frozen=True):
    """client: its number, below `clients`. name: as the server has it."""

    client: ClientNumber
    clients: Clients
    name: Name

    def __post_init__(self) -> None:
        _check_number(self.client, self.clients)


Body = TypeVar("Body", bound=Said)


def to_json(said: Said) -> bytes:
    """The body. Numbers that are not finite become null, which no field of a number takes."""
    return msgspec.json.encode(said)


def from_json(body: bytes | bytearray, kind: type[Body]) -> Body:
    """The inverse of `to_json`. Raises RequestError for anything else: RangeError where all fields
    that have to be there are, and one of them has a value that it cannot have."""
    if len(body) > MOST_BODY:
        raise RequestError(f"the body has {len(body)} bytes, and may have {MOST_BODY}")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        refused = RangeError if _is_of(body, kind) else RequestError
        raise refused(f"the body is no {kind.__name__}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no {kind.__name__}: {error}") from error


def _is_of(body: bytes | bytearray, kind: type[Said]) -> bool:
    """Whether an object has all the fields that a body of this kind has to have."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    required = [one.encode_name for one in msgspec.structs.fields(kind) if one.required]
    return isinstance(found, dict) and all(name in found for name in required)


def _check_number(client: int, clients: int) -> None:
    """Raises ValueError for a number that no client of the run has."""
    if client >= clients:
        raise ValueError(f"client {client} is none of {clients} clients, whose numbers begin at 0")


def _check_elements(forms: Iterable[tuple[str, list[int]]]) -> None:
    """Raises ValueError for tensors of more elements than can be counted."""
    if sum(math.prod(shape) for _, shape in forms) > 1 << 53:
        raise ValueError("the tensors have more than 2^53 elements")
