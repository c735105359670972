"""What server and clients say to each other. Nothing else passes between them.

    clients -> server    Join        how many examples each of us has
    server -> client     Assignment  train from these weights
    client -> server     Update      how my weights moved
    server -> client     Say         a step of a protocol on updates that stay where they are
    client -> server     Answer      what I say to that
    server -> clients    Settled     these updates made the new model, and those did not count
    server -> client     Refuse      your update does not count, and why
    server -> clients    Measure     how good is this model on what you do not train on?
    clients -> server    Measured    so good, on so many examples
    server -> clients    Ask         what do you have in place of a part of the model?
    clients -> server    Kept        this, in the mean

Weights and updates are lists of flat tensors, one a dtype of the model (`dure.tensors.flat`);
buffers are in the model's own order. Each assignment has a ticket, which its update gives back: an
update that nobody asked for does not exist. In one process a message is handed over as it is, and
its tensors with it; `dure.protocol.encoding` makes bytes of it.
"""

from __future__ import annotations

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
"""Why a client has no update: bad values in its data, local training that diverged, too few data.

Only these texts, since they are counted and shown, and a message may come from anybody.
"""

NOT_FINITE = frozenset(get_args(Failure)[:4])
"""Those that bad values in the data cause, or a learning rate that is too large."""


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Payload bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


# tag=True: the encoded message begins with its kind, by which the decoder chooses.
class Join(msgspec.Struct, frozen=True, tag=True):
    """Clients introduce themselves.

    sizes: how many examples each has; its place here is its number.
    """

    sizes: Sequence[int]


# gc=False: Python's collector passes over these. They are many, and never part of a cycle.
class Assignment(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The server asks a client to train from these weights.

    round: the number of the global model that these are. turn: where the client's batches and draws
    go on: the round, and without rounds, where a client may be handed the same weights again, how
    often it has answered. extra: what an algorithm sends besides, such as SCAFFOLD's control.
    deadline: when the update has to be there, in the server's time; None where nobody waits for it.
    nbytes: of all its tensors.
    """

    ticket: int
    client: int
    round: int
    turn: int
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]
    # A field, counted once for all assignments of a model, and not anew for each client.
    nbytes: int
    extra: Sequence[Tensor] = ()
    deadline: float | None = None


class Update(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A client's answer: how its weights moved. The model itself never leaves the client.

    delta: weights after training less the weights received. buffers: after training. examples: how
    many the client has. samples: examples processed, local epochs counted. loss: mean over what the
    loss has counted in them, `counted`; None: each of them counts one. failure: why there is no
    update, which then has no tensors and counts nowhere. steps: of its optimizer, those that it has
    made in the round: 1 to `samples`.
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
        """What the loss has counted in the samples."""
        return float(self.samples) if self.counted is None else self.counted

    @property
    def weight(self) -> float:
        """n_k, what the loss counts in the client's examples: as many, where each counts one."""
        return self.examples * (self.count / self.samples)


class Form(msgspec.Struct, frozen=True):
    """What a tensor that is asked for looks like."""

    dtype: str
    shape: tuple[int, ...]


class Say(msgspec.Struct, frozen=True, tag=True):
    """A step of a protocol that server and clients follow before updates are combined.

    For clients whose updates lie with them, and not with the server (secure aggregation). ticket:
    of the update. stage: counts the steps of an attempt. body: the protocol's own message. wants:
    the tensors that the answer is to have. waits: also for a client that is away, as long as a step
    may take: nobody else can answer.
    """

    ticket: int
    client: int
    stage: int
    body: bytes
    wants: Sequence[Form] = ()
    waits: bool = False


class Answer(msgspec.Struct, frozen=True, tag=True):
    """A client's answer to a `Say` of the same ticket and stage."""

    ticket: int
    client: int
    stage: int
    body: bytes
    tensors: Sequence[Tensor] = ()


class Settled(msgspec.Struct, frozen=True, tag=True):
    """What became of the updates of a new model, by their tickets.

    kept: they count, so that their clients keep what they have learned for the next time. dropped:
    they did not, for these reasons.
    """

    kept: Sequence[int]
    dropped: Sequence[int]
    reasons: Sequence[str] = ()


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """The update with this ticket does not count, for this reason.

    client: -1 where nobody knows whose it is.
    """

    ticket: int
    client: int
    reason: str


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Clients are to measure this model, and their own, on what they do not train on.

    round: the number of the global model. weights, buffers: what the server has of it. now: on the
    federation's clock, for clients whose data come and go. frozen, frozen_buffers: an earlier
    model, to be measured beside this one on the newest data; none where nobody wants that.
    """

    round: int
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]
    now: float
    frozen: Sequence[Tensor] = ()
    frozen_buffers: Sequence[Tensor] = ()


class Measured(msgspec.Struct, frozen=True, tag=True):
    """How good a model is on what clients do not train on.

    clients: who have measured. values: of each metric, one number a client, in their order; NaN
    where a client has none. examples: with how many each has measured it, 0 where it has not. sums:
    what each has added up, by which a metric over the examples of all clients is known
    (`dure.tasks.sums`); metrics that are not added have none. forms: of those sums, "" for pairs.
    failures: who could not measure something, and why.
    """

    clients: Sequence[int]
    values: dict[str, list[float]]
    examples: dict[str, list[int]] = {}
    sums: dict[str, list[list[float]]] = {}
    forms: dict[str, str] = {}
    failures: dict[int, str] = {}


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Where a part of the model belongs to each client: what have they there?"""


class Kept(msgspec.Struct, frozen=True, tag=True):
    """What clients have in place of a part of the model.

    tensors: the mean of what those have there who took part; none where nobody has anything.
    """

    tensors: Sequence[Tensor]


Message = (
    Join | Assignment | Update | Say | Answer | Settled | Refuse | Measure | Measured | Ask | Kept
)
