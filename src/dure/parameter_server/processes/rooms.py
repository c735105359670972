"""What of a worker's pool is free: rooms for the weights that it pulls, and for its gradients.

    pull   the question names a room; each server writes its shards there, and the model uses the
           weights where they lie
    push   the gradient lies in a room; each server reads it there

A room is used again as soon as nobody can write to it, or read it, any more:

    weights    a server that was asked has answered this question, or a later one for the same
               shard: it deals with questions in order, and answers each once
    gradients  every server has acknowledged the push

A server that was stopped, and replaced, may wake in the middle of an answer and write the rest of
it. So a room that such a server was told of is never used again: it stays allocated, and its
contents matter to nobody. Two rooms for weights do otherwise, since the model stays in one while
the next answer comes into the other.

Between hosts there is no memory to name. There the model uses the weights where they came, if a
server has all of them; what comes from several is copied into one room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dure.collectives.shared_memory.pool import empty_shared
from dure.parameter_server.keys import Range
from dure.parameter_server.messages import Pull, Values
from dure.parameter_server.processes.said import Said
from dure.parameter_server.worker import WorkerSide
from dure.tensors.flat import FlatParameters, Room


@dataclass(eq=False)
class Slot:
    """A room for weights. parts: by shard. writers: who may still write there, and what they were
    asked: the server, the shard and the worker, with the number of the question.
    """

    room: Room
    parts: list[Tensor]
    writers: dict[tuple[str, int, int], int] = field(default_factory=dict)


class Slots:
    """The rooms of a worker for the weights of its model, which has these shards."""

    def __init__(self, flat: FlatParameters, shards: Sequence[Range]) -> None:
        self._flat = flat
        self._shards = shards
        self._undivided = [keys.vector for keys in shards] == [*range(len(flat.buffers))]
        """Whether every vector is one shard."""
        self._slots: list[Slot] = []
        self._asked: dict[int, Slot] = {}
        """Where the answers to the newest question of a worker are to be written."""
        self._used: Slot | None = None
        """Where the model is."""

    def ask(self, worker: int) -> list[Tensor]:
        """Where the answers to the next question of a worker are to be written, by shard."""
        slot = self._asked[worker] = self._free()
        return slot.parts

    def said(self, to: str, message: Said) -> None:
        """Something was said. Who was asked may write from now on where the question says."""
        if isinstance(message, Pull) and message.into is not None:
            key = (to, message.shard, message.worker)
            self._asked[message.worker].writers[key] = message.number

    def heard(self, sender: str, message: Said) -> None:
        """Something was heard. Who has answered writes no more where it was to until then."""
        if not isinstance(message, Values):
            return
        key = (sender, message.shard, message.worker)
        for slot in self._slots:
            if slot.writers.get(key, message.number + 1) <= message.number:
                del slot.writers[key]

    def take(self, worker: int, values: Sequence[Tensor]) -> None:
        """Has the model use the values that have come, by shard."""
        slot = self._asked.pop(worker)
        strange = [
            part.data_ptr() != value.data_ptr()
            for part, value in zip(slot.parts, values, strict=True)
        ]
        self._used = slot
        if all(strange) and self._undivided:
            self._used = None
            self._flat.move(self._flat.room(values))
            return
        if slot.writers:  # some came another way, and may still come this one
            self._used = self._free()
        for part, value in zip(self._used.parts, values, strict=True):
            if part.data_ptr() != value.data_ptr():
                part.copy_(value)
        self._flat.move(self._used.room)

    def _free(self) -> Slot:
        """One to which nobody writes, and of which nobody thinks that it is theirs."""
        taken = [self._used, *self._asked.values()]
        for slot in self._slots:
            if not slot.writers and slot not in taken:
                return slot
        buffers = [empty_shared(len(one), dtype=one.dtype) for one in self._flat.buffers]
        parts = [buffers[keys.vector][keys.start : keys.stop] for keys in self._shards]
        self._slots.append(Slot(self._flat.room(buffers), parts))
        return self._slots[-1]


class Outbox:
    """The rooms of a worker for gradients, which are flat vectors like these."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = [(len(one), one.dtype) for one in like]
        self._free: list[list[Tensor]] = []
        self._out: list[tuple[WorkerSide, int, list[Tensor]]] = []

    def room(self, side: WorkerSide) -> list[Tensor]:
        """Where the gradient of the next push of a side is to be written, by vector."""
        for one in [one for one in self._out if _safe(one[0], one[1])]:
            self._out.remove(one)
            self._free.append(one[2])
        if self._free:
            buffers = self._free.pop()
        else:
            buffers = [empty_shared(count, dtype=dtype) for count, dtype in self._like]
        self._out.append((side, side.clock, buffers))
        return buffers


def _safe(side: WorkerSide, clock: int) -> bool:
    """Whether every server has acknowledged the push of a clock."""
    return side.clock - side.behind > clock
