"""Messages between processes, in addition to those of the state machines.

leader -> worker   Grant     batches before this one may be begun worker -> leader   Ask
request for parts; these parts are done leader -> worker   Deal      parts to do; none if there is
no work now leader -> worker   Hold      begin nothing more until the next grant   (`holding`)
worker -> leader   Held      batches and parts that are not begun worker -> leader   Report    all
granted work is done; results since the last report leader -> any      Tell      request for
counters any    -> leader   Account   counters since the start leader -> server   Save      request
for a shard  (the answer is a Snapshot) leader -> worker   Keep      request for the residuals of
compressed pushes worker -> leader   Unsent    residuals leader -> worker   Unsent    initial
residuals, from a checkpoint any    -> leader   Failed    an error of the task leader -> any
Leads     heartbeat leader -> any      Lost      the run has ended, since these ranks are lost
leader -> any      Over      the run has ended

Workers in a user's loop (`own_loop`) send in addition:

worker -> leader   Leave     the worker is done, and every server has all its pushes (answer: Over)
worker -> leader   Waits     the worker's pull has timed out
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from torch import Tensor

from dure.errors import PeerLostError
from dure.parameter_server import messages
from dure.parameter_server.layout import Layout
from dure.parameter_server.scheduler import Work
from dure.record.checkpoint import pack_tree, unpack_tree
from dure.record.on_disk import in_memory


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Permission to begin the batches before `until`.

    Args:
        until: first batch that is not granted.
        clock: number of this worker's pushes at the servers, before it has made any itself.
        done: the worker's batches that were done before the run began or was resumed.
        buffers: initial buffers of its model; empty to keep its own.
    """

    until: int
    clock: int
    done: int = 0
    buffers: list[Tensor] = []


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Request of a worker for parts. `done` are parts that every server has."""

    worker: int
    done: tuple[Work, ...] = ()


class Deal(msgspec.Struct, frozen=True, tag=True):
    """Parts that a worker is to do; none if no granted work is left."""

    works: tuple[Work, ...]


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Request to begin nothing more, as the run is to end."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Hold`: the worker begins none of its batches from `until` on.

    `back` are assigned parts that it has not begun. The worker finishes and reports begun work.
    """

    worker: int
    until: int
    back: tuple[Work, ...] = ()


class Report(msgspec.Struct, frozen=True, tag=True):
    """Report of a worker that has done all batches before `until`.

    Args:
        worker: number of the worker.
        until: first batch not done.
        layout: version of the worker's layout.
        loss: sum of the losses over `counted`.
        counted: count of the loss.
        examples: number of examples.
        pushes: number of pushes.
        staleness: histogram of staleness: clocks behind -> number of pulls.
        counters: counters since the start of the process, as `Counters.as_list`.
        done: parts that every server has.
        buffers: buffers of the worker's model.
        trace: timeline since the last report, as `Trace.packed`.
    """

    worker: int
    until: int
    layout: int
    loss: float
    counted: float
    examples: int
    pushes: int
    staleness: dict[int, int]
    counters: list[float]
    done: tuple[Work, ...]
    buffers: list[Tensor]
    trace: bytes


class Shipped(msgspec.Struct, frozen=True, tag=True):
    """Serialised `Snapshot`: its tree without tensors, and the named tensors."""

    shard: int
    epoch: int
    number: int
    tree: Any
    names: list[str]
    tensors: list[Tensor]


class Save(msgspec.Struct, frozen=True, tag=True):
    """Request for the state of a shard."""

    shard: int


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Request for the residuals of a worker's compressed pushes."""


class Unsent(msgspec.Struct, frozen=True, tag=True):
    """Residuals of compressed pushes.

    `worker` is the worker that stores them. `errors` are by the number of the worker on whose
    behalf the pushes were made, and by portion.
    """

    worker: int
    errors: dict[int, list[Tensor]]


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Request for the counters of a server or a worker."""


class Account(msgspec.Struct, frozen=True, tag=True):
    """Counters of a node, as in a `Report`. `name` is the node, such as "server 0"."""

    name: str
    counters: list[float]
    trace: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Error of a process. The kind "loss" means a loss that is not finite: `value`."""

    who: str
    step: str
    kind: str
    reason: str
    traceback: str = ""
    value: float = 0.0


class Over(msgspec.Struct, frozen=True, tag=True):
    """End of the run, by this limit; empty if the run has failed."""

    ended: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Departure of a worker after `clock` pushes, which all servers have.

    `buffers` are those of its model.
    """

    worker: int
    clock: int
    buffers: list[Tensor]


class Leads(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of the leader."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """Timeout of a worker's pull at a clock: these shards have not answered."""

    worker: int
    clock: int
    shards: tuple[int, ...]


class Lost(msgspec.Struct, frozen=True, tag=True):
    """End of the run by a `PeerLostError` with these fields."""

    ranks: tuple[int, ...]
    operation: str
    step: str
    reason: str

    def error(self) -> PeerLostError:
        """Return the error."""
        return PeerLostError(self.ranks, self.operation, self.step, self.reason)


Said: TypeAlias = (
    messages.Push
    | messages.Acknowledged
    | messages.Pull
    | messages.Values
    | messages.Refused
    | messages.Replicate
    | messages.Replicated
    | messages.Norms
    | messages.Beat
    | messages.Lease
    | Layout
    | Shipped
    | Grant
    | Ask
    | Deal
    | Hold
    | Held
    | Report
    | Save
    | Keep
    | Unsent
    | Tell
    | Account
    | Failed
    | Over
    | Leave
    | Waits
    | Lost
    | Leads
)
"""Messages that a frame can contain."""


def shipped(snapshot: messages.Snapshot) -> Shipped:
    """Return a snapshot in its serialised form."""
    tree, tensors = pack_tree(snapshot.state)
    return Shipped(
        shard=snapshot.shard,
        epoch=snapshot.epoch,
        number=snapshot.number,
        tree=tree,
        names=list(tensors),
        tensors=list(map(in_memory, tensors.values())),
    )


def landed(shipped: Shipped) -> messages.Snapshot:
    """Return the snapshot; the inverse of `shipped`."""
    tensors = dict(zip(shipped.names, shipped.tensors, strict=True))
    state = unpack_tree(shipped.tree, tensors)
    return messages.Snapshot(shipped.shard, shipped.epoch, shipped.number, state)
