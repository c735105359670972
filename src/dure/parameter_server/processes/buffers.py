"""Buffers in a worker's pool: for pulled weights and for gradients.

    pull   the request names a buffer; each server writes its shards there, and the model uses the
           weights in place
    push   the gradient is in a buffer; each server reads it there

A buffer is reused as soon as no process can write to it or read it:

    weights    each server has answered this request, or a later request for the same shard: a
               server processes requests in order, and answers each once
    gradients  every server has acknowledged the push

A server that was stopped and replaced may resume in the middle of an answer and write the rest. A
buffer that such a server knows is therefore never reused: it stays allocated, with irrelevant
contents. Otherwise two buffers for weights suffice, since the model uses one while the next answer
arrives in the other.

Hosts share no memory with each other. Across hosts the model uses the received memory if a single
server has all weights; answers of several servers are copied into a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dure.collectives.shared_memory.pool import empty_shared
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.messages import Pull, Values
from dure.parameter_server.processes.messages import ProcessMessage
from dure.parameter_server.worker import WorkerProtocol
from dure.tensors.flat import FlatBuffers, FlatParameters


@dataclass(eq=False)
class WeightBuffer:
    """Buffer for weights.

    Args:
        room: memory of the weights.
        parts: views by shard.
        writers: processes that may still write: (server, shard, worker) -> number of the request.
    """

    room: FlatBuffers
    parts: list[Tensor]
    writers: dict[tuple[str, int, int], int] = field(default_factory=dict)


class WeightBuffers:
    """Weight buffers of a worker whose model has these shards."""

    def __init__(self, flat: FlatParameters, shards: Sequence[KeyRange]) -> None:
        self._flat = flat
        self._shards = shards
        self._undivided = [keys.vector for keys in shards] == [*range(len(flat.buffers))]
        """Whether every vector is a single shard."""
        self._slots: list[WeightBuffer] = []
        self._asked: dict[int, WeightBuffer] = {}
        """Buffer for the answers to a worker's newest request."""
        self._used: WeightBuffer | None = None
        """Buffer that the model uses."""

    def ask(self, worker: int) -> list[Tensor]:
        """Return the memory for the answers to a worker's next request, by shard."""
        slot = self._asked[worker] = self._free()
        return slot.parts

    def said(self, to: str, message: ProcessMessage) -> None:
        """Register a sent message: after a pull the server may write to its buffer."""
        if isinstance(message, Pull) and message.into is not None:
            key = (to, message.shard, message.worker)
            self._asked[message.worker].writers[key] = message.number

    def heard(self, sender: str, message: ProcessMessage) -> None:
        """Register a received message: after its answer a server no longer writes to the buffer."""
        if not isinstance(message, Values):
            return
        key = (sender, message.shard, message.worker)
        for slot in self._slots:
            if slot.writers.get(key, message.number + 1) <= message.number:
                del slot.writers[key]

    def take(self, worker: int, values: Sequence[Tensor]) -> None:
        """Let the model use the received values, by shard."""
        slot = self._asked.pop(worker)
        strange = [
            part.data_ptr() != value.data_ptr()
            for part, value in zip(slot.parts, values, strict=True)
        ]
        if self._flat.is_apart:  # the model is on a device, and its memory stays
            for keys, value in zip(self._shards, values, strict=True):
                self._flat.buffers[keys.vector][keys.start : keys.stop].copy_(value)
            return
        self._used = slot
        if all(strange) and self._undivided:
            self._used = None
            self._flat.move(self._flat.room(values))
            return
        if slot.writers:  # a late server may still write to this buffer
            self._used = self._free()
        for part, value in zip(self._used.parts, values, strict=True):
            if part.data_ptr() != value.data_ptr():
                part.copy_(value)
        self._flat.move(self._used.room)

    def _free(self) -> WeightBuffer:
        """Return a buffer without writers that is neither in use nor requested."""
        taken = [self._used, *self._asked.values()]
        for slot in self._slots:
            if not slot.writers and slot not in taken:
                return slot
        buffers = [empty_shared(len(one), dtype=one.dtype) for one in self._flat.buffers]
        parts = [buffers[keys.vector][keys.start : keys.stop] for keys in self._shards]
        self._slots.append(WeightBuffer(self._flat.room(buffers), parts))
        return self._slots[-1]


class GradientBuffers:
    """Gradient buffers of a worker, with flat vectors like these."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = [(len(one), one.dtype) for one in like]
        self._free: list[list[Tensor]] = []
        self._out: list[tuple[WorkerProtocol, int, list[Tensor]]] = []

    def room(self, side: WorkerProtocol) -> list[Tensor]:
        """Return memory for the gradient of a side's next push, by vector."""
        for one in [one for one in self._out if _safe(one[0], one[1])]:
            self._out.remove(one)
            self._free.append(one[2])
        if self._free:
            buffers = self._free.pop()
        else:
            buffers = [empty_shared(count, dtype=dtype) for count, dtype in self._like]
        self._out.append((side, side.clock, buffers))
        return buffers


def _safe(side: WorkerProtocol, clock: int) -> bool:
    """Return whether every server has acknowledged the push of a clock."""
    return side.clock - side.behind > clock
