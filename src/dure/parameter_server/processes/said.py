"""What processes say to each other besides the messages of the state machines.

leader -> worker   Grant     batches before this one may be begun
worker -> leader   Ask       parts, please; these are done
leader -> worker   Deal      do these parts; none: there is nothing now
leader -> worker   Hold      begin nothing more, until you are granted it   (`holding`)
worker -> leader   Held      this I have not begun
worker -> leader   Report    I have nothing to do; this I have done since I said so last
leader -> any      Tell      what have you counted?
any    -> leader   Account   this, since I began
leader -> server   Save      what have you of this shard?  (the answer is a Snapshot)
leader -> worker   Keep      what have your compressed pushes left out?
worker -> leader   Unsent    this
leader -> worker   Unsent    begin with this, of a checkpoint
any    -> leader   Failed    an error of the task's own
leader -> any      Leads     I live
leader -> any      Lost      the run has ended, since these ranks are lost
leader -> any      Over      the run has ended

Workers in a loop of their own (`own_loop`) say besides:

worker -> leader   Leave     I am done, and every server has all that I pushed  (answer: Over)
worker -> leader   Waits     I have waited too long for my pull
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
    """Batches before `until` may be begun.

    clock: how many pushes of this worker the servers have, when it has made none itself. done:
    batches of its own that were done before the run began, or was resumed. buffers: with which its
    model goes on; none: with its own.
    """

    until: int
    clock: int
    done: int = 0
    buffers: list[Tensor] = []


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for parts. done: parts that every server has."""

    worker: int
    done: tuple[Work, ...] = ()


class Deal(msgspec.Struct, frozen=True, tag=True):
    """The parts that a worker is to do; none: nothing is left of what was granted."""

    works: tuple[Work, ...]


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Nothing is to be begun any more, as the run is to end."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """A worker begins none of its batches from `until` on. back: dealt parts that it has not begun.

    What it has begun it finishes, and reports.
    """

    worker: int
    until: int
    back: tuple[Work, ...] = ()


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


class Keep(msgspec.Struct, frozen=True, tag=True):
    """What have a worker's compressed pushes left out so far?"""


class Unsent(msgspec.Struct, frozen=True, tag=True):
    """What compressed pushes have left out so far.

    worker: who keeps it, or is to keep it. errors: by the number of the worker in whose name, and
    by portion.
    """

    worker: int
    errors: dict[int, list[Tensor]]


class Tell(msgspec.Struct, frozen=True, tag=True):
    """What has a server, or a worker, counted?"""


class Account(msgspec.Struct, frozen=True, tag=True):
    """What one has counted, as a worker says it in a `Report`. name: "server 0"."""

    name: str
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


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A worker is done, after so many pushes, which all servers have. buffers: its model's."""

    worker: int
    clock: int
    buffers: list[Tensor]


class Leads(msgspec.Struct, frozen=True, tag=True):
    """The leader lives, and so does the run."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """A worker has waited for its pull at a clock for too long: these shards have not answered."""

    worker: int
    clock: int
    shards: tuple[int, ...]


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The run has ended with a `PeerLostError`, whose fields these are."""

    ranks: tuple[int, ...]
    operation: str
    step: str
    reason: str

    def error(self) -> PeerLostError:
        """It."""
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
        tensors=list(map(in_memory, tensors.values())),
    )


def landed(shipped: Shipped) -> messages.Snapshot:
    """The inverse of `shipped`."""
    tensors = dict(zip(shipped.names, shipped.tensors, strict=True))
    state = unpack_tree(shipped.tree, tensors)
    return messages.Snapshot(shipped.shard, shipped.epoch, shipped.number, state)
