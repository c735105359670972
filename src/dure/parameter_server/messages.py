"""Messages between workers, servers and the manager; all their communication.

    worker  -> server    Push          gradient of keys, at a clock
    server  -> worker    Acknowledged  the push is safe, at the server and its replica
    worker  -> server    Pull          request for keys, once they contain the required updates
    server  -> worker    Values        values of keys, and the updates in them
    server  -> any       Refused       the message's epoch or life has ended
    server  -> server    Replicate     apply this update to the copy
    server  -> server    Replicated    the copy contains the update
    server  -> server    Snapshot      whole shard: the receiver has its copy from now on
    leader  -> server    Snapshot      the same for the first owner: the initial weights
    server  -> server    Norms         the norms of the sender's shards, if steps are clipped
    any     -> manager   Beat          heartbeat
    manager -> any       Layout        owners of shards, and members (`layout`)
    manager -> server    Lease         permission to answer until a time after a beat

A message may arrive late, twice, or never: senders retry until an answer arrives, and receivers
discard duplicates. Node names are "worker 2", "server 0", "manager".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from torch import Tensor

from dure.parameter_server.layout import ShardLayout

MANAGER = "manager"


def server(number: int) -> str:
    """Return the node name of a server."""
    return f"server {number}"


def worker(number: int) -> str:
    """Return the node name of a worker."""
    return f"worker {number}"


class Push(msgspec.Struct, frozen=True, tag=True):
    """Update of the keys from `start` on by a worker.

    Args:
        shard: number of the shard.
        epoch: epoch of the shard.
        worker: number of the worker.
        life: life of the worker.
        clock: number of the push, from 0.
        start: first key.
        gradient: the mean gradient, or a codec's message.
        weight: weight of the gradient, such as the number of examples.
        version: number of updates in the weights at which the gradient was computed.
        rows: table rows, as in `Pull`.
        digest: digest of table rows, as in `Pull`.
        encoded: number of keys behind a codec's message (`compressed`), which includes the weight;
            None
            for a plain gradient.
        step: the worker's own step, from 0, for learning rate schedules.
        gradients: number of gradients in the sum.
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
    """Confirmation that a worker's pushes before `clock` to the keys from `start` on are safe."""

    shard: int
    worker: int
    start: int
    clock: int


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Request of a worker for the keys start … stop-1.

    Args:
        shard: number of the shard.
        epoch: epoch of the shard.
        worker: number of the worker.
        life: life of the worker.
        number: number of the request, which the answer repeats.
        start: first key.
        stop: last key + 1.
        clock: clock that the worker is about to begin; the values must contain all updates before
            clock - staleness. None accepts the current values.
        own: number of the worker's own pushes that the values must contain.
        into: shared memory for the answer; None without.
        rows: requested table rows, ascending; None requests all changed rows.
        digest: digest of rows that the server has received before, in place of rows.
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
    """Answer to a pull: the keys at a single moment.

    Args:
        shard: number of the shard.
        worker: the worker that asked.
        number: number of the request.
        values: values of the keys.
        version: number of updates in the values.
        own: number of the worker's own pushes in the values.
        floor: least number of pushes of any worker of the group in the values; None if the server
            waits
            for no worker.
        layout: version of the layout behind the answer; the receiver needs at least this version.
        rows: rows of the values, if all changed rows were requested.
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


class PushRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """Rejection of a message whose epoch or life has ended.

    `epoch` is the shard's current epoch. The reason "rows" means that the server does not know the
    list of rows behind the digest, so the worker must send the rows.
    """

    shard: int
    epoch: int
    reason: Reason


class AppliedPush(msgspec.Struct, frozen=True):
    """A push in an update."""

    worker: int
    clock: int


class Norms(msgspec.Struct, frozen=True, tag=True):
    """Squared norms of a clock's mean gradient, by shard, as known to the sender.

    `asks` requests the receiver's norms as an answer.
    """

    group: int
    clock: int
    squares: Mapping[int, float]
    asks: bool = False


class ShardStep(msgspec.Struct, frozen=True):
    """Update of the keys from `start` on, ready to apply; equal for shard and copy.

    Args:
        start: first key.
        gradient: the gradient.
        pushes: pushes in the update.
        factor: factor of the learning rates, from schedule, age and share.
        rows: table rows of the gradient.
        decay: factor of a weight decay that is part of the gradient, equal to the gradient's
            factor.
        moves: whether the optimizer makes a step; a push of weight 0 moves only the clock.
        norms: norms by which the gradient was clipped.
    """

    start: int
    gradient: Tensor
    pushes: tuple[AppliedPush, ...]
    factor: float = 1.0
    rows: Tensor | None = None
    decay: float = 1.0
    moves: bool = True
    norms: Norms | None = None


class Replicate(msgspec.Struct, frozen=True, tag=True):
    """Update number `number` of a shard, from 0."""

    shard: int
    epoch: int
    number: int
    step: ShardStep


class Replicated(msgspec.Struct, frozen=True, tag=True):
    """Confirmation that the copy contains the first `number` updates."""

    shard: int
    epoch: int
    number: int


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """Whole shard after `number` updates. `state` is from `Shard.state`."""

    shard: int
    epoch: int
    number: int
    state: Any


class PushCount(msgspec.Struct, frozen=True):
    """Number of a worker's pushes in a shard: least and most over its keys."""

    shard: int
    epoch: int
    worker: int
    life: int
    least: int
    most: int


class ServerBeat(msgspec.Struct, frozen=True, tag="Beat"):
    """Heartbeat of a node.

    Args:
        node: name of the node.
        layout: version of the node's layout.
        sent: time on the node's own clock, in seconds.
        counts: push counts of closing workers.
        clock: clock of a worker.
        without: shards that a server owns without any data, since they were lost with the previous
            owner.
    """

    node: str
    layout: int
    sent: float
    counts: tuple[PushCount, ...] = ()
    clock: int = 0
    without: tuple[int, ...] = ()


class Lease(msgspec.Struct, frozen=True, tag=True):
    """Permission for a server to answer until `seconds` after it sent the beat of time `sent`."""

    sent: float
    seconds: float


Message = (
    Push
    | Acknowledged
    | Pull
    | Values
    | PushRefused
    | Replicate
    | Replicated
    | Norms
    | Snapshot
    | ServerBeat
    | Lease
    | ShardLayout
)
Envelope = tuple[str, Message]
"""Receiver and message."""
