"""What processes say to each other besides the messages of the state machines.

leader -> worker   Grant     batches before this one may be begun
worker -> leader   Ask       parts, please; these are done
leader -> worker   Deal      do these parts; none: there is nothing now
worker -> leader   Report    I have nothing to do; this I have done since I said so last
leader -> server   Tell      what have you counted?
server -> leader   Account   this, since I began
leader -> server   Save      what have you of this shard?  (the answer is a Snapshot)
any    -> leader   Failed    an error of the task's own
leader -> any      Over      the run has ended
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from torch import Tensor

from dure.parameter_server import messages
from dure.parameter_server.layout import Layout
from dure.parameter_server.scheduler import Work
from dure.record.checkpoint import pack_tree, unpack_tree


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Batches before `until` may be begun.

    clock: how many pushes of this worker the servers have, when it has made none itself. done:
    batches of its own that were done before the run began, or was resumed.
    """

    until: int
    clock: int
    done: int = 0


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for parts. done: parts that every server has."""

    worker: int
    done: tuple[Work, ...] = ()


class Deal(msgspec.Struct, frozen=True, tag=True):
    """The parts that a worker is to do; none: nothing is left of what was granted."""

    works: tuple[Work, ...]


class Report(msgspec.Struct, frozen=True, tag=True):
    """A worker has done all that was granted until a batch, and knows the layout of a version.

    loss: the sum of the losses of what `counted` counts. staleness: how often its weights were how
    many clocks behind. counters: as `Counters.as_list`, since this process began. buffers: its own.
    trace: its lanes since it said so last, as `Trace.packed`.
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
    """A `Snapshot` on its way: its tree without tensors, and the tensors that belong into it."""

    shard: int
    epoch: int
    number: int
    tree: Any
    names: list[str]
    tensors: list[Tensor]


class Save(msgspec.Struct, frozen=True, tag=True):
    """What is in a shard?"""

    shard: int


class Tell(msgspec.Struct, frozen=True, tag=True):
    """What has a server counted?"""


class Account(msgspec.Struct, frozen=True, tag=True):
    """What a server has counted, as a worker says it in a `Report`."""

    server: int
    counters: list[float]
    trace: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An error of a process. kind: "loss" where a loss became not finite: `value`."""

    who: str
    step: str
    kind: str
    reason: str
    traceback: str = ""
    value: float = 0.0


class Over(msgspec.Struct, frozen=True, tag=True):
    """The run has ended, by this limit; empty where it has failed."""

    ended: str


Said: TypeAlias = (
    messages.Push
    | messages.Acknowledged
    | messages.Pull
    | messages.Values
    | messages.Refused
    | messages.Replicate
    | messages.Replicated
    | messages.Beat
    | messages.Lease
    | Layout
    | Shipped
    | Grant
    | Ask
    | Deal
    | Report
    | Save
    | Tell
    | Account
    | Failed
    | Over
)
"""What a frame can hold."""


def shipped(snapshot: messages.Snapshot) -> Shipped:
    """A snapshot as it travels."""
    tree, tensors = pack_tree(snapshot.state)
    return Shipped(
        shard=snapshot.shard,
        epoch=snapshot.epoch,
        number=snapshot.number,
        tree=tree,
        names=list(tensors),
        tensors=list(tensors.values()),
    )


def landed(shipped: Shipped) -> messages.Snapshot:
    """The inverse of `shipped`."""
    tensors = dict(zip(shipped.names, shipped.tensors, strict=True))
    state = unpack_tree(shipped.tree, tensors)
    return messages.Snapshot(shipped.shard, shipped.epoch, shipped.number, state)
