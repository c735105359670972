"""Messages between a federated server and its clients, and their direction.

    clients -> server    JoinMessage          numbers of examples of the clients
    server -> client     Assignment           train from these weights
    client -> server     Update               difference of the weights after training
    server -> client     ProtocolStep         a step of a protocol on updates that stay at clients
    client -> server     ProtocolAnswer       answer to a ProtocolStep
    server -> clients    UpdateOutcomes       updates in the new model, and those left out
    server -> client     Refuse               an update does not count, with the reason
    server -> clients    EvaluationRequest    evaluate this model on held-out examples
    clients -> server    EvaluationResults    metrics, and numbers of examples
    server -> clients    PersonalisedRequest  request for the personalised part of the model
    clients -> server    PersonalisedMean     mean of the clients' personalised parts

No other data pass between server and clients. Weights and updates are lists of flat tensors, one
per dtype of the model (`dure.tensors.flat`); buffers are in the order of the model. Every
assignment has an id (`ticket`), which its update repeats; a server ignores an update without a
known id. Inside one process, messages and their tensors are passed by reference;
`dure.protocol.encoding` encodes messages as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
from torch import Tensor

Failure = Literal[
    "its first loss is not finite",
    "its loss became not finite",
    "its weights became not finite",
    "what it keeps became not finite",
    "it has one example, of which batch norm has no statistics",
]
"""Reason of a client without an update: bad data, divergence, or too few examples.

A fixed list of texts, since the server counts and shows them, and a message may come from an
untrusted sender.
"""

NOT_FINITE = frozenset(get_args(Failure)[:4])
"""Failures caused by bad values in the data, or by a learning rate that is too large."""


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Return the payload bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


# tag=True: the encoded message begins with its type name, by which the decoder selects the class.
class JoinMessage(msgspec.Struct, frozen=True, tag="Join"):
    """Introduction of the clients.

    `sizes` has the number of examples of each client; the index is the client's number.
    """

    sizes: Sequence[int]


# gc=False: Python's garbage collector skips these objects. They are many, and never form a cycle.
class Assignment(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Request to a client to train from these weights.

    Args:
        ticket: Id of the assignment, which the update repeats.
        client: Number of the client.
        round: Number of the global model whose weights are sent.
        turn: Position in the client's streams of batches and random draws: the round; in a run
            without rounds, the number of updates that the client has sent, because the client may
            receive the same weights twice.
        weights: Flat tensors of the global model, split by dtype.
        buffers: Buffers of the global model.
        nbytes: Payload bytes of all tensors.
        extra: Additional tensors of the algorithm, such as SCAFFOLD's control variate.
        deadline: Time on the server's clock by which the update must arrive; None for no deadline.
    """

    ticket: int
    client: int
    round: int
    turn: int
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]
    # A field, computed once per model and shared by the assignments of all clients.
    nbytes: int
    extra: Sequence[Tensor] = ()
    deadline: float | None = None


class Update(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Update of a client: the change of its weights. The trained model never leaves the client.

    Args:
        ticket: Id of the assignment.
        client: Number of the client.
        round: Number of the global model that the client has trained from.
        examples: Number of the client's examples.
        samples: Examples processed, counted once per local epoch.
        loss: Mean loss over `counted` items.
        delta: Weights after training minus the received weights.
        buffers: Buffers after training.
        extra: Additional tensors of the algorithm.
        counted: Number of items in the samples over which the loss averages, such as tokens; None
            if the loss counts every sample once.
        failure: Reason for an update without tensors, which counts nowhere; None for a usable
            update.
        steps: Optimizer steps of the client in this round, 1 to `samples`.
    """

    ticket: int
    client: int
    round: int
    examples: int
    samples: int
    loss: float
    delta: Sequence[Tensor]
    buffers: Sequence[Tensor]
    extra: Sequence[Tensor] = ()
    counted: float | None = None
    failure: Failure | None = None
    steps: int = 1

    @property
    def nbytes(self) -> int:
        return nbytes(self.delta) + nbytes(self.buffers) + nbytes(self.extra)

    @property
    def count(self) -> float:
        """Number of items in the samples over which the loss averages."""
        return float(self.samples) if self.counted is None else self.counted

    @property
    def weight(self) -> float:
        """n_k: the loss's count of the client's examples; their number if each counts 1."""
        return self.examples * (self.count / self.samples)


class WantedTensor(msgspec.Struct, frozen=True):
    """Dtype and shape of a requested tensor."""

    dtype: str
    shape: tuple[int, ...]


class ProtocolStep(msgspec.Struct, frozen=True, tag="Say"):
    """Step of a protocol between server and clients before updates are combined.

    Used if the updates stay at the clients instead of the server (secure aggregation).

    Args:
        ticket: Assignment id of the update.
        client: Number of the client.
        stage: Number of the step within an attempt.
        body: Message of the protocol.
        wants: Dtypes and shapes of the tensors that the answer must have.
        waits: Whether the server also waits for an absent client, up to the timeout of a step,
            because no other client can answer.
    """

    ticket: int
    client: int
    stage: int
    body: bytes
    wants: Sequence[WantedTensor] = ()
    waits: bool = False


class ProtocolAnswer(msgspec.Struct, frozen=True, tag="Answer"):
    """Answer of a client to a `ProtocolStep` with the same ticket and stage."""

    ticket: int
    client: int
    stage: int
    body: bytes
    tensors: Sequence[Tensor] = ()


class UpdateOutcomes(msgspec.Struct, frozen=True, tag="Settled"):
    """Assignment ids of the updates that counted in a new model, and of the updates that did not.

    A client whose id is in `kept` keeps the state it has learned for its next assignment. `reasons`
    has the reason of each id in `dropped`.
    """

    kept: Sequence[int]
    dropped: Sequence[int]
    reasons: Sequence[str] = ()


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Notice that the update with this ticket does not count, with the reason.

    `client` is -1 if the server does not know the client.
    """

    ticket: int
    client: int
    reason: str


class EvaluationRequest(msgspec.Struct, frozen=True, tag="Measure"):
    """Request to evaluate this model, and the clients' own models, on held-out examples.

    Args:
        round: Number of the global model.
        weights: Flat tensors of the global model.
        buffers: Buffers of the global model.
        now: Time on the federation's clock, for clients whose data change over time.
        frozen: Weights of an earlier model to evaluate on the newest data, for comparison; empty
            for no comparison.
        frozen_buffers: Buffers of the earlier model.
    """

    round: int
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]
    now: float
    frozen: Sequence[Tensor] = ()
    frozen_buffers: Sequence[Tensor] = ()


class EvaluationResults(msgspec.Struct, frozen=True, tag="Measured"):
    """Metrics of a model on the clients' held-out examples.

    Args:
        clients: Numbers of the clients that have evaluated the model.
        values: For each metric, a value per client in the order of `clients`; NaN for a client
            without a value.
        examples: For each metric, the number of examples per client; 0 for a client without a
            value.
        sums: For each additive metric, the sums of each client, from which the metric over the
            examples of all clients follows (`dure.tasks.sums`).
        forms: Forms of the sums; "" for pairs.
        failures: Errors of clients that could not compute a metric.
    """

    clients: Sequence[int]
    values: dict[str, list[float]]
    examples: dict[str, list[int]] = {}
    sums: dict[str, list[list[float]]] = {}
    forms: dict[str, str] = {}
    failures: dict[int, str] = {}


class PersonalisedRequest(msgspec.Struct, frozen=True, tag="Ask"):
    """Request for the clients' values of the personalised part of the model."""


class PersonalisedMean(msgspec.Struct, frozen=True, tag="Kept"):
    """Mean of the clients' values for the personalised part of the model.

    `tensors` is the mean over the clients that have taken part; empty if no client has values.
    """

    tensors: Sequence[Tensor]


Message = (
    JoinMessage
    | Assignment
    | Update
    | ProtocolStep
    | ProtocolAnswer
    | UpdateOutcomes
    | Refuse
    | EvaluationRequest
    | EvaluationResults
    | PersonalisedRequest
    | PersonalisedMean
)


def merge_evaluations(said: Sequence[EvaluationResults]) -> EvaluationResults:
    """Merge measurements into one message, sorted by client.

    The messages `said` may arrive in any order. A client that occurs in two messages counts as in
    the first. The result has sums for a metric only if every message with this metric has sums of
    the same form.
    """
    rows: dict[int, tuple[EvaluationResults, int]] = {}
    failures: dict[int, str] = {}
    for one in said:
        for place, client in enumerate(one.clients):
            rows.setdefault(client, (one, place))
        for client, reason in one.failures.items():
            failures.setdefault(client, reason)
    clients = sorted(rows)
    values: dict[str, list[float]] = {}
    examples: dict[str, list[int]] = {}
    sums: dict[str, list[list[float]]] = {}
    forms: dict[str, str] = {}
    for name in dict.fromkeys(name for one in said for name in one.values):
        values[name] = [_at(*rows[client], name) for client in clients]
        examples[name] = [_count_at(*rows[client], name) for client in clients]
        have = [one for one in said if name in one.values]
        told = {one.forms.get(name) for one in have if name in one.sums}
        if all(name in one.sums for one in have) and len(told) == 1:
            sums[name] = [_sums_at(*rows[client], name) for client in clients]
            forms[name] = told.pop() or ""
    return EvaluationResults(clients, values, examples, sums, forms, dict(sorted(failures.items())))


def _at(one: EvaluationResults, place: int, name: str) -> float:
    told = one.values.get(name, [])
    return told[place] if place < len(told) else math.nan


def _count_at(one: EvaluationResults, place: int, name: str) -> int:
    told = one.examples.get(name, [])
    return told[place] if place < len(told) else 0


def _sums_at(one: EvaluationResults, place: int, name: str) -> list[float]:
    told = one.sums.get(name, [])
    return told[place] if place < len(told) else []
