"""What workers, servers and the manager say to each other. Nothing else passes between them.

    worker  -> server    Push          my gradient of your keys, at this clock
    server  -> worker    Acknowledged  I have it, and so has my replica
    worker  -> server    Pull          your keys, as soon as they contain what I have to see
    server  -> worker    Values        so they are, and this they contain
    server  -> any       Refused       you speak of an epoch, or a life, that is over
    server  -> server    Replicate     apply this update to your copy
    server  -> server    Replicated    my copy has it
    server  -> server    Snapshot      here is all of a shard: you hold its copy from now on
    leader  -> server    Snapshot      the same, to the first owner: the weights of the beginning
    server  -> server    Norms         my shards' part of a step's norm, where steps are clipped
    any     -> manager   Beat          I am here
    manager -> any       Layout        who owns what, and who takes part (`layout`)
    manager -> server    Lease         you may answer until this time after your beat

A message may come late, twice, or not at all: what is not answered is said again, and what was done
is not done again. Nodes are called by their names: "worker 2", "server 0", "manager".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from torch import Tensor

from dure.parameter_server.layout import Layout

MANAGER = "manager"


def server(number: int) -> str:
    """What a server is called."""
    return f"server {number}"


def worker(number: int) -> str:
    """What a worker is called."""
    return f"worker {number}"


class Push(msgspec.Struct, frozen=True, tag=True):
    """A worker's update of the keys from `start` on, its `clock`-th, counted from 0.

    weight: what its mean gradient counts, such as examples. version: how many updates the weights
    contained to which it belongs. rows, digest: of a table, as in `Pull`. encoded: how many keys
    the gradient is about, where it is the message of a codec (`compressed`), which has the weight
    in it. step: the worker's own, from 0, by which learning rates are scheduled. gradients: how
    many the gradient is the sum of.
    """

    shard: int
    epoch: int
    worker: int
    life: int
    clock: int
    start: int
    gradient: Tensor
    weight: float
    version: int
    rows: Tensor | None = None
    digest: Tensor | None = None
    encoded: int | None = None
    step: int = 0
    gradients: int = 1

    @property
    def stop(self) -> int:
        return self.start + (len(self.gradient) if self.encoded is None else self.encoded)


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """All pushes of a worker before `clock` to the keys from `start` on are safe."""

    shard: int
    worker: int
    start: int
    clock: int


class Pull(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for the keys start … stop-1.

    clock: what it is about to begin, so that all updates before clock - staleness have to be
    contained; None asks for what there is. own: so many of its own pushes have to be contained.
    number: of the question, which the answer repeats. into: where the answer is to be written, if
    both see that memory. rows: of a table, those that are wanted, in ascending order; None asks for
    all that were changed. digest: in place of rows that the server was sent before.
    """

    shard: int
    epoch: int
    worker: int
    life: int
    number: int
    start: int
    stop: int
    clock: int | None = None
    own: int = 0
    into: Tensor | None = None
    rows: Tensor | None = None
    digest: Tensor | None = None


class Values(msgspec.Struct, frozen=True, tag=True):
    """The answer to a worker's pull: the keys as they were at one moment.

    version: how many updates they contain. own: how many pushes of the one who asked. floor: so
    many of each worker of its group; None where nobody is waited for any more. layout: the version
    of the layout by which they were given: whoever takes them has to know who takes part by that.
    rows: whose values these are, where all rows of a table were asked for that were changed.
    """

    shard: int
    worker: int
    number: int
    values: Tensor
    version: int
    own: int
    floor: int | None
    layout: int
    rows: Tensor | None = None


Reason = Literal["epoch", "life", "lease", "rows"]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What was said does not count: its epoch or its life is over. epoch: the shard's now.

    "rows": the digest is of no list of rows that this server knows; they have to be sent.
    """

    shard: int
    epoch: int
    reason: Reason


class Made(msgspec.Struct, frozen=True):
    """A push that an update contains."""

    worker: int
    clock: int


class Norms(msgspec.Struct, frozen=True, tag=True):
    """The squared norms of a clock's mean gradient, by shard, as far as the sender knows them.

    asks: whether the receiver is to answer with those that it knows.
    """

    group: int
    clock: int
    squares: Mapping[int, float]
    asks: bool = False


class Step(msgspec.Struct, frozen=True):
    """An update of the keys from `start` on, ready to be applied: the same for shard and copy.

    pushes: what it contains. factor: of the learning rates: by their schedule, by its age, and by
    its share. rows: of a table, to which the gradient belongs. decay: what weight decay that is
    part of the gradient is multiplied with, as the gradient was. moves: whether the optimizer makes
    a step; a push that counts nothing moves the clock alone. norms: by which the gradient was
    clipped.
    """

    start: int
    gradient: Tensor
    pushes: tuple[Made, ...]
    factor: float = 1.0
    rows: Tensor | None = None
    decay: float = 1.0
    moves: bool = True
    norms: Norms | None = None


class Replicate(msgspec.Struct, frozen=True, tag=True):
    """The `number`-th update of a shard, counted from 0."""

    shard: int
    epoch: int
    number: int
    step: Step


class Replicated(msgspec.Struct, frozen=True, tag=True):
    """The copy contains the first `number` updates."""

    shard: int
    epoch: int
    number: int


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """All of a shard, after `number` updates. state: what `Shard.state` gives."""

    shard: int
    epoch: int
    number: int
    state: Any


class Count(msgspec.Struct, frozen=True):
    """How many pushes of a worker a shard has: at least, and at most, over its keys."""

    shard: int
    epoch: int
    worker: int
    life: int
    least: int
    most: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A node is there. layout: the version that it has. sent: by its own clock.

    counts: of the workers that are closing. clock: a worker's. without: shards that a server is to
    answer for, and of which it has nothing: they went with the one before.
    """

    node: str
    layout: int
    sent: float
    counts: tuple[Count, ...] = ()
    clock: int = 0
    without: tuple[int, ...] = ()


class Lease(msgspec.Struct, frozen=True, tag=True):
    """A server may answer until `seconds` after it sent the beat of `sent`."""

    sent: float
    seconds: float


Message = (
    Push
    | Acknowledged
    | Pull
    | Values
    | Refused
    | Replicate
    | Replicated
    | Norms
    | Snapshot
    | Beat
    | Lease
    | Layout
)
Envelope = tuple[str, Message]
"""To whom, and what."""
