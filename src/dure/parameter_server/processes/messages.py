"""Messages between processes, in addition to those of the state machines.

    leader -> worker   WorkLease         batches before this one may be begun
    worker -> leader   RequestWork       request for parts; these parts are done
    leader -> worker   AssignWork        parts to do; none if there is no work now
    leader -> worker   Drain             begin nothing more until the next lease
    worker -> leader   Drained           batches and parts that are not begun
    worker -> leader   Report            all leased work is done; results since the last report
    leader -> any      RequestCounters   request for counters
    any    -> leader   ProcessCounters   counters since the start
    leader -> server   Save              request for a shard (answer: SerialisedSnapshot)
    leader -> worker   SaveResiduals     request for the residuals of compressed pushes
    worker -> leader   Residuals         residuals
    leader -> worker   Residuals         initial residuals, from a checkpoint
    any    -> leader   RankFailed        an error of the task
    leader -> any      Heartbeat         the leader is alive
    leader -> any      RankLost          the run has ended, since these ranks are lost
    leader -> any      RunEnded          the run has ended

Workers in a user's loop (`user_loop`) send in addition:

    worker -> leader   LeaveRequest      the worker is done, and every server has all its pushes
                                         (answer: RunEnded)
    worker -> leader   PullTimeout       the worker's pull has timed out
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from torch import Tensor

from dure.errors import PeerLostError
from dure.parameter_server import messages
from dure.parameter_server.layout import ShardLayout
from dure.parameter_server.scheduler import BatchPart
from dure.record.checkpoint import pack_tree, unpack_tree
from dure.record.disk_tensors import in_memory


class WorkLease(msgspec.Struct, frozen=True, tag="Grant"):
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


class RequestWork(msgspec.Struct, frozen=True, tag="Ask"):
    """Request of a worker for parts. `done` are parts that every server has."""

    worker: int
    done: tuple[BatchPart, ...] = ()


class AssignWork(msgspec.Struct, frozen=True, tag="Deal"):
    """Parts that a worker is to do; none if no granted work is left."""

    works: tuple[BatchPart, ...]


class Drain(msgspec.Struct, frozen=True, tag="Hold"):
    """Request to begin nothing more, as the run is to end."""


class Drained(msgspec.Struct, frozen=True, tag="Held"):
    """Answer to `Drain`: the worker begins none of its batches from `until` on.

    `back` are assigned parts that it has not begun. The worker finishes and reports begun work.
    """

    worker: int
    until: int
    back: tuple[BatchPart, ...] = ()


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
    done: tuple[BatchPart, ...]
    buffers: list[Tensor]
    trace: bytes


class SerialisedSnapshot(msgspec.Struct, frozen=True, tag="Shipped"):
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


class SaveResiduals(msgspec.Struct, frozen=True, tag="Keep"):
    """Request for the residuals of a worker's compressed pushes."""


class Residuals(msgspec.Struct, frozen=True, tag="Unsent"):
    """Residuals of compressed pushes.

    `worker` is the worker that stores them. `errors` are by the number of the worker on whose
    behalf the pushes were made, and by portion.
    """

    worker: int
    errors: dict[int, list[Tensor]]


class RequestCounters(msgspec.Struct, frozen=True, tag="Tell"):
    """Request for the counters of a server or a worker."""


class ProcessCounters(msgspec.Struct, frozen=True, tag="Account"):
    """Counters of a node, as in a `Report`. `name` is the node, such as "server 0"."""

    name: str
    counters: list[float]
    trace: bytes


class RankFailed(msgspec.Struct, frozen=True, tag="Failed"):
    """Error of a process. The kind "loss" means a loss that is not finite: `value`."""

    who: str
    step: str
    kind: str
    reason: str
    traceback: str = ""
    value: float = 0.0


class RunEnded(msgspec.Struct, frozen=True, tag="Over"):
    """End of the run, by this limit; empty if the run has failed."""

    ended: str


class LeaveRequest(msgspec.Struct, frozen=True, tag="Leave"):
    """Departure of a worker after `clock` pushes, which all servers have.

    `buffers` are those of its model.
    """

    worker: int
    clock: int
    buffers: list[Tensor]


class Heartbeat(msgspec.Struct, frozen=True, tag="Leads"):
    """Heartbeat of the leader."""


class PullTimeout(msgspec.Struct, frozen=True, tag="Waits"):
    """Timeout of a worker's pull at a clock: these shards have not answered."""

    worker: int
    clock: int
    shards: tuple[int, ...]


class RankLost(msgspec.Struct, frozen=True, tag="Lost"):
    """End of the run by a `PeerLostError` with these fields."""

    ranks: tuple[int, ...]
    operation: str
    step: str
    reason: str

    def error(self) -> PeerLostError:
        """Return the error."""
        return PeerLostError(self.ranks, self.operation, self.step, self.reason)


ProcessMessage: TypeAlias = (
    messages.Push
    | messages.Acknowledged
    | messages.Pull
    | messages.Values
    | messages.PushRefused
    | messages.Replicate
    | messages.Replicated
    | messages.Norms
    | messages.ServerBeat
    | messages.Lease
    | ShardLayout
    | SerialisedSnapshot
    | WorkLease
    | RequestWork
    | AssignWork
    | Drain
    | Drained
    | Report
    | Save
    | SaveResiduals
    | Residuals
    | RequestCounters
    | ProcessCounters
    | RankFailed
    | RunEnded
    | LeaveRequest
    | PullTimeout
    | RankLost
    | Heartbeat
)
"""Messages that a frame can contain."""


def serialise_snapshot(snapshot: messages.Snapshot) -> SerialisedSnapshot:
    """Return a snapshot in its serialised form."""
    tree, tensors = pack_tree(snapshot.state)
    return SerialisedSnapshot(
        shard=snapshot.shard,
        epoch=snapshot.epoch,
        number=snapshot.number,
        tree=tree,
        names=list(tensors),
        tensors=list(map(in_memory, tensors.values())),
    )


def deserialise_snapshot(shipped: SerialisedSnapshot) -> messages.Snapshot:
    """Return the snapshot; the inverse of `serialise_snapshot`."""
    tensors = dict(zip(shipped.names, shipped.tensors, strict=True))
    state = unpack_tree(shipped.tree, tensors)
    return messages.Snapshot(shipped.shard, shipped.epoch, shipped.number, state)
