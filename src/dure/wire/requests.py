"""JSON bodies of the requests and answers between a network server and its clients.

    POST  /v1/enrol      Enrol -> Enrolled              register my key with an invitation's token
    POST  /v1/check-in   CheckIn -> Welcome             describe this client; learn the settings
    POST  /v1/next       NextRequest -> NextAnswer      request work; waits until there is work
    POST  /v1/watch      WatchRequest -> WatchAnswer    is my work still needed? waits while it is
    GET   /v1/tensors/DIGEST?from=BYTE                  tensors by their digest, from an offset
    POST  /v1/uploads    UploadRequest -> UploadState   announce an upload of this size and digest
    PATCH /v1/uploads/UPLOAD?offset=BYTE
                         bytes -> UploadState           part of an upload, from an offset on
    POST  /v1/failures   TrainingFailure                no update, since the client's code raised
    POST  /v1/measured   EvaluationReport               metrics of a model on held-out examples
    POST  /v1/ready      UpdateReady                    my update is ready, and stays at the client
    POST  /v1/answers    ProtocolAnswerBody             answer to a step of a protocol

The last two requests occur in runs whose updates stay at their clients (secure aggregation), which
neither reserve nor send updates. `ProtocolAnswerBody` answers the step in `NextAnswer.say`; the
client uploads the tensors of an answer before the answer, by the same requests as an update.

The client sends requests and the server answers; a message of the server waits for the client's
`next`. Every request is idempotent: a client may repeat the request, gets the same answer, and the
server acts once.

No body contains code. Since the receiver acts on every number, the type of each field defines its
range, and `from_json` refuses a body with a value out of range before any action. Constraints
between values (the number of a client below the number of clients) are checked too. The receiver
checks the constraints that only it knows (the owner of an assignment id, the size of an update, the
site's policy): `deploy.client.agreement`, `deploy.server`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec

VERSION = 2
"""Version of this protocol. A server answers clients of its own version and the version before.

Since version 2, updates may stay at their clients.
"""

MOST_BODY = 1 << 20
"""Maximum bytes of a JSON body; tensors travel separately."""

MOST_STEP_BYTES = 700 << 10
"""Maximum bytes of a protocol message; its base64 text fits into a body."""


MOST_CLIENTS = 1 << 20
"""Maximum clients of a run over a network; a site makes a list of them."""

MOST_THREADS = 1024
"""Maximum number of threads that a server may require of a client."""

MOST_HEARTBEAT = 3600.0
"""Maximum seconds of a heartbeat."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Count of examples, bytes and the like: exact as a float, and in the range of SQLite."""

ClientNumber = Annotated[int, msgspec.Meta(ge=0, lt=MOST_CLIENTS)]
AnyClient = Annotated[int, msgspec.Meta(ge=-1, lt=MOST_CLIENTS)]
"""Number of a client; -1 for an observer without a number."""

Clients = Annotated[int, msgspec.Meta(ge=1, le=MOST_CLIENTS)]
Cohort = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Loss = Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""SHA-256, in hexadecimal digits."""

RunId = Annotated[str, msgspec.Meta(pattern=r"\A\w[\w.-]{0,99}\Z")]
"""Id of a run, which becomes part of file names."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
Line = Annotated[str, msgspec.Meta(max_length=16_384)]
Stage = Annotated[int, msgspec.Meta(ge=0, le=255)]
"""Number of a protocol's step."""

QuestionId = Annotated[str, msgspec.Meta(max_length=64)]
"""Id of a question."""

ProtocolBytes = Annotated[bytes, msgspec.Meta(max_length=MOST_STEP_BYTES)]
"""Message of a protocol."""

Dtype = Annotated[str, msgspec.Meta(max_length=32)]
Shape = Annotated[list[Count], msgspec.Meta(max_length=64)]


class RequestError(ValueError):
    """A body is invalid."""


class RangeError(RequestError):
    """A body has all required fields, and a value out of range or of another type."""


class MessageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """Base of all bodies. Unknown fields are ignored: the next version may add fields."""


class Machine(MessageBody, frozen=True):
    """Properties that determine whether two machines compute the same bits.

    `capability` is the processor's capability in torch. `engine` is the engine of local training.
    """

    torch: Name
    capability: Name
    engine: Name
    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)]


class TaskDescription(MessageBody, frozen=True):
    """Model and task that a site would train, for comparison with the server's.

    Args:
        forms: (dtype, shape) of each tensor that travels, by name.
        frozen: Digest of the weights that are not trained, which the site must have.
        frozen_bytes: Bytes of the stream of the frozen weights.
        loss: Name of the loss; empty for a client with a trainer of another library.
        optimizer: Name of the optimizer; empty for such a client.
        buffers: Names of the tensors that are buffers, not weights.
        metrics: Names of the metrics.
        features: Names of the features.
        asks: Further requirements of the task on training, by name, such as {"clip_norm": "1.0"}.
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


class CheckIn(MessageBody, frozen=True):
    """Introduction of a client.

    Args:
        version: Protocol version of the client.
        name: Name of the client.
        examples: Number of training examples.
        held_out: Number of held-out examples.
        wants: Requested client number; None for any number.
        trains: Model and task of the site; None for a client with its own training loop.
        machine: Properties of the client's machine.
        looks: Whether the client only observes the run, and takes no client number.
        smallest_cohort: Minimum number of clients whose updates may be combined with an update of
            this client.
    """

    version: Count
    name: Name
    examples: Count
    held_out: Count = 0
    wants: ClientNumber | None = None
    trains: TaskDescription | None = None
    machine: Machine | None = None
    looks: bool = False
    smallest_cohort: Cohort = 1


class Welcome(MessageBody, frozen=True):
    """Answer to a check-in.

    Args:
        version: Protocol version of the server.
        run: Id of the run.
        client: Number of the client, below `clients`.
        clients: Number of clients of the run.
        strategy: Strategy, in the form of run folders.
        seed: Seed of the run.
        trains: Model and task of the run.
        machine: Properties of the server's machine.
        heartbeat: Seconds without a byte after which a connection counts as lost.
        patience: Maximum seconds that a `next` waits.
        differs: Properties in which the client's machine computes differently, in words.
        holds: Whether updates stay at their clients, which then report neither their number of
            examples nor other facts about themselves.
        roster: Owner's roster (`wire.owners_roster`) in JSON; empty without a roster.
        smallest_cohort: Minimum number of clients whose updates the server combines; 0 for a server
            of an older version.
    """

    version: Count
    run: RunId
    client: AnyClient
    clients: Clients
    strategy: dict[str, Any]
    seed: Seed
    trains: TaskDescription
    machine: Machine
    heartbeat: Annotated[float, msgspec.Meta(ge=0.001, le=MOST_HEARTBEAT)]
    patience: Annotated[float, msgspec.Meta(ge=0.001, le=10 * MOST_HEARTBEAT)]
    differs: list[Line] = []
    holds: bool = False
    roster: str = ""
    smallest_cohort: Count = 0

    def __post_init__(self) -> None:
        _check_number(self.client, self.clients)


class UpdateOutcome(MessageBody, frozen=True):
    """Outcome of an update: whether the update counts, and the reason if it does not."""

    ticket: Count
    kept: bool
    reason: Line = ""


class Train(MessageBody, frozen=True):
    """Assignment of a client.

    Args:
        ticket: Id of the assignment.
        round: Number of the global model.
        turn: Position in the client's streams of batches and random draws.
        tensors: Digest of the weights, buffers and extras.
        bytes: Bytes of their stream.
        left: Seconds until the deadline; None for no deadline.
        holds: Whether the update stays at the client.
        smallest_cohort: Minimum number of clients whose updates are combined with this update.
    """

    ticket: Count
    round: Count
    turn: Count
    tensors: Digest
    bytes: Count
    left: Seconds | None = None
    holds: bool = False
    smallest_cohort: Cohort = 1


class ProtocolStepBody(MessageBody, frozen=True):
    """Step of a protocol on an update that stays at its client.

    `asking` is the id of this question, which the answer repeats: a restarted server asks again
    under another id. `body` is the protocol's message. `wants` has the (dtype, shape) of the
    tensors of the answer.
    """

    ticket: Count
    stage: Stage
    asking: QuestionId
    body: ProtocolBytes
    wants: Annotated[list[tuple[Dtype, Shape]], msgspec.Meta(max_length=64)] = []

    def __post_init__(self) -> None:
        _check_elements(self.wants)


class EvaluationTask(MessageBody, frozen=True):
    """Model to evaluate on the client's held-out examples, or to store."""

    round: Count
    tensors: Digest
    bytes: Count


class NextAnswer(MessageBody, frozen=True):
    """Answer to `NextRequest`: outcomes of updates, then new work.

    Args:
        outcomes: Outcomes of earlier updates.
        train: An assignment.
        measure: A model to evaluate.
        say: Step of a protocol, which precedes other work.
        over: Reason if the run has ended; None while it runs.
        final: Last model of a run that has ended, for clients that store the newest model.
    """

    outcomes: list[UpdateOutcome] = []
    train: Train | None = None
    measure: EvaluationTask | None = None
    say: ProtocolStepBody | None = None
    over: Line | None = None
    final: EvaluationTask | None = None


class NextRequest(MessageBody, frozen=True):
    """Request for work. `confirmed` lists the ids of outcomes that the client has stored."""

    confirmed: list[Count] = []


class WatchRequest(MessageBody, frozen=True):
    ticket: Count


class WatchAnswer(MessageBody, frozen=True):
    """Answer to `WatchRequest`.

    `wanted` is True if the update would still count. `over` is the reason if the run has ended.
    """

    wanted: bool
    reason: Line = ""
    over: Line | None = None


class UploadRequest(MessageBody, frozen=True):
    """Announcement of an upload: all fields of an update except its tensors.

    Args:
        ticket: Id of the assignment.
        bytes: Bytes of the stream of tensors.
        digest: Digest of the stream of tensors.
        examples: Number of the client's examples.
        samples: Examples processed.
        loss: Mean training loss.
        counted: Number of items that the loss averages over; None if each sample counts 1.
        failure: Reason for an update without tensors.
        seconds: Seconds of training.
        metrics: Metrics of training, by name.
        asking: Id of the question that these tensors answer; empty for an update. Other fields of
            an answer are not used.
        steps: Optimizer steps; 0 if the client does not report them.
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
    asking: QuestionId = ""
    steps: Count = 0


class UploadState(MessageBody, frozen=True):
    """State of an upload.

    `upload` is its id. `offset` is the number of stored bytes. `part` is the maximum size in bytes
    of a request. `complete` is True if all bytes are stored and the update is recorded.
    """

    upload: Name
    # The sender compares both with the size of its update.
    offset: int
    part: int
    complete: bool = False


class TrainingFailure(MessageBody, frozen=True):
    """The client's own code raised an error. `message` is set only if the site shares messages."""

    ticket: Count
    kind: Line
    file: Line = ""
    line: Count = 0
    message: str = ""


class EvaluationReport(MessageBody, frozen=True):
    """Metrics of a model by a client, as `ModelMeasured` of `dure.protocol.messages`.

    Args:
        round: Number of the global model.
        values: Value of each metric; None without a value.
        examples: Number of examples of each metric.
        sums: Sums of each additive metric.
        forms: Forms of the sums.
        failure: Error of a metric that is missing.
    """

    round: Count
    values: dict[str, float | None] = {}
    examples: dict[str, Count] = {}
    sums: dict[str, list[float | None]] = {}
    forms: dict[str, str] = {}
    failure: str = ""


class UpdateReady(MessageBody, frozen=True):
    """Notice that the update of an assignment is ready and stays at its client."""

    ticket: Count


class ProtocolAnswerBody(MessageBody, frozen=True):
    """Answer to a protocol step, with the `ticket`, `stage` and `asking` of its `ProtocolStepBody`.

    `body` is None if the client has left the protocol. `failure` is the type of the error if the
    client's code raised.
    """

    ticket: Count
    stage: Stage
    asking: QuestionId
    body: ProtocolBytes | None = None
    failure: Line = ""


class Refusal(MessageBody, frozen=True):
    """Body of every refusal: the reason, and the remedy."""

    error: str


class Enrol(MessageBody, frozen=True):
    """Enrolment of a client's key. This request has no signature.

    Args:
        token: Token of an invitation.
        key: Public key, as `wire.signatures` encodes it.
        proof: Proof that the sender has the private key, by `wire.signatures.prove`.
        name: Requested name.
        wants: Requested client number; None for any number.
    """

    token: Name
    key: Name
    proof: Name
    name: Name = ""
    wants: ClientNumber | None = None


class Enrolled(MessageBody, frozen=True):
    """Answer to an enrolment.

    `client` is the client's number, below `clients`. `name` is the name in the server's register.
    """

    client: ClientNumber
    clients: Clients
    name: Name

    def __post_init__(self) -> None:
        _check_number(self.client, self.clients)


Body = TypeVar("Body", bound=MessageBody)


def to_json(said: MessageBody) -> bytes:
    """Encode a body. Numbers that are not finite become null, which number fields refuse."""
    return msgspec.json.encode(said)


def from_json(body: bytes | bytearray, kind: type[Body]) -> Body:
    """Decode a body that `to_json` has encoded.

    Raises RangeError if all required fields are present and a value is invalid, and RequestError
    for any other invalid body.
    """
    if len(body) > MOST_BODY:
        raise RequestError(f"the body has {len(body)} bytes, but may have at most {MOST_BODY}")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        refused = RangeError if _is_of(body, kind) else RequestError
        raise refused(f"the body is not a valid {kind.__name__}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not a valid {kind.__name__}: {error}") from error


def _is_of(body: bytes | bytearray, kind: type[MessageBody]) -> bool:
    """Return whether the JSON object has all required fields of this kind of body."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    required = [one.encode_name for one in msgspec.structs.fields(kind) if one.required]
    return isinstance(found, dict) and all(name in found for name in required)


def _check_number(client: int, clients: int) -> None:
    """Check a client's number. Raises ValueError unless it is below the number of clients."""
    if client >= clients:
        raise ValueError(
            f"there is no client {client}: the run has {clients} clients, counted from 0"
        )


def _check_elements(forms: Iterable[tuple[str, list[int]]]) -> None:
    """Check the number of elements. Raises ValueError for more than 2^53."""
    if sum(math.prod(shape) for _, shape in forms) > 1 << 53:
        raise ValueError("the tensors have more than 2^53 elements")
