"""Sums of gradients over the ranks: a message for each block, the trailer, and late gradients.

If a block is a single parameter, its message is the gradient itself. Otherwise, and if messages
have to be in shared memory, gradients are copied into N rows, a row for each rank; in shared
memory the rank's own row is not copied.

The last message of a step carries the trailer (`dure.collectives.trailer`) in each of its rows,
because a reduce-scatter gives every rank a row. The trailer has the fields of the caller, and

    used   for each parameter          how many ranks have a gradient of it
    late   for each block, in stage 3  how many ranks have a gradient that missed its message

All ranks send a block again if it is late on any rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.handle import Handle
from dure.collectives.trailer import Numbers, Trailer, TrailerField, summed_field
from dure.errors import DureError
from dure.parallel.zero.chunk_collectives import ChunkCollectives, DeferredHandle
from dure.parallel.zero.gather_order import GatherAction
from dure.parallel.zero.message_rows import MessageRows
from dure.parallel.zero.partition_layout import Stage
from dure.parallel.zero.partitioned_parameters import drop_gradients, gradients_of, take_gradients
from dure.parallel.zero.shares import BufferPool, ParameterShare


@dataclass(frozen=True)
class PiggybackFields:
    """Numbers that a caller sends with every step.

    fields: the caller's fields of the trailer. say: returns this rank's numbers for these fields.
    """

    fields: Sequence[TrailerField] = ()
    say: Callable[[], Numbers] = dict


_EXACT = (torch.float32, torch.float64)
"""Dtypes that represent the numbers of a trailer exactly."""


class _Sent(NamedTuple):
    """Message that is being sent.

    into: destination of the sum. pooled: whether the message's memory returns to the pool. adds:
    whether the sum is added to an existing gradient.
    """

    share: ParameterShare
    message: Tensor
    into: Tensor
    pooled: bool
    adds: bool
    handle: Handle[None]


class _Prepared(NamedTuple):
    """Rows and the start of their reduce-scatter, which are reused with the same memory."""

    rows: MessageRows
    begin: Callable[[Sequence[Tensor]], Handle[None]]


class GradientReduction:
    """Gradients of a rank, from autograd to the optimizer's parts.

    Args:
        shares: Shares of the blocks that have gradients.
        wire: Sends the messages.
        pool: Memory of the messages.
        stage: Stage of ZeRO.
        most: Largest number of messages in flight.
        rider: Numbers that the caller sends with the trailer.

    Attributes:
        heard: Sums of the trailer's fields in the last pass, by name.
        carrier: Block whose message carries the trailer; None sends the trailer separately.
    """

    def __init__(
        self,
        shares: Sequence[ParameterShare],
        wire: ChunkCollectives,
        pool: BufferPool,
        *,
        stage: Stage,
        most: int,
        rider: PiggybackFields,
    ) -> None:
        self.shares = list(shares)
        self.wire = wire
        self.pool = pool
        self.stage = stage
        self.most = most
        self._say = rider.say
        self.trailer = self._tail_with(rider.fields)
        self.trailer_sums = self.trailer.decode([0.0] * self.trailer.length)
        self.carrier: int | None = None
        self.passes = 0
        self.some_used = False
        # blocks of one parameter, whose gradient may be computed in the memory of its message
        self._number_of = {
            id(share.parameters[0]): n for n, share in enumerate(self.shares) if share.block.alone
        }
        # the memory that `place_of` returned, by block, until the gradient is sent
        self._places: dict[int, Tensor] = {}
        self._prepared: dict[tuple[int, int, int, int], _Prepared] = {}
        pool.before_change = self._prepared.clear  # no reference to a dropped buffer may remain
        # messages of stage 1 whose rows are gradients, until the gradients are dropped
        self._kept: list[tuple[Tensor, Handle[None]]] = []
        # messages that have ended on this rank, and that other ranks may still read
        self._unread: list[tuple[Tensor, Handle[None]]] = []
        self._sent: deque[_Sent] = deque()
        self.begin()

    def _tail_with(self, fields: Sequence[TrailerField]) -> Trailer:
        parameters = sum(len(share.parameters) for share in self.shares)
        late = len(self.shares) if self.stage == 3 else 0
        own = (summed_field("used", parameters), summed_field("late", late))
        group = self.wire.group
        return Trailer([*fields, *own], group.rank, group.size)

    def choose_carrier(self, events: Sequence[GatherAction]) -> int | None:
        """Return the block that carries the trailer; None if no block can carry it.

        The carrier is the last block that is copied in any case, or else the last block. Half
        precision does not represent the numbers exactly: if all gradients are in half precision,
        the trailer is a separate message.
        """
        order = [action.number for action in events if action.kind == "reduce"]
        able = [number for number in order if self.shares[number].block.dtype in _EXACT]
        copied = [number for number in able if not self.shares[number].block.alone]
        last = copied or able
        return last[-1] if last else None

    def begin(self) -> None:
        """Begin a pass."""
        self._end_what_is_left()
        # by block: parameters whose gradient autograd has finished; parameters whose gradient has
        # been sent
        self._arrived: list[set[int]] = [set() for _ in self.shares]
        self._used: list[set[int]] = [set() for _ in self.shares]
        self._issued = [False] * len(self.shares)
        self._adds = [share.accumulates() for share in self.shares]
        self._numbers: Tensor | None = None

    def _end_what_is_left(self) -> None:
        """Wait for the messages of a failed pass, which has raised its error already."""
        while self._sent:
            sent = self._sent.popleft()
            with suppress(DureError, RuntimeError):
                self.wire.wait(sent.handle, "gradients")
            # Other ranks may still read the message: its memory is not reused.
            if sent.pooled:
                self.pool.leave(sent.message)

    @property
    def has_sent(self) -> bool:
        """Whether some gradients of this pass have been sent."""
        return any(self._issued)

    def arrived(self, number: int, index: int) -> bool:
        """Record that parameter `index` of a block has its gradient of this pass.

        Returns whether the block is complete now.
        """
        self._arrived[number].add(index)
        return self.ready(number)

    def ready(self, number: int) -> bool:
        """Return whether all parameters of a block have their gradients of this pass."""
        return len(self._arrived[number]) == len(self.shares[number].parameters)

    def issue(self, number: int) -> None:
        """Send the available gradients of a block."""
        self._issued[number] = True
        carries = number == self.carrier
        self._send(number, carries)
        # More messages in flight would need more memory. The first message ends first.
        while len(self._sent) > self.most:
            self._settle(self._sent.popleft())

    def _send(self, number: int, carries: bool) -> None:
        adds = self._adds[number]
        self._adds[number] = True  # late gradients are added to the sum of those sent before
        # With a trailer the gradient has to be copied into rows.
        alone = self.shares[number].block.alone and not carries
        self._sent.append(
            self._send_alone(number, adds) if alone else self._send_rows(number, carries, adds)
        )

    def _into(self, number: int, message: Tensor, adds: bool, carries: bool) -> Tensor:
        """Return the destination of a message's sum: its final memory, or this rank's row."""
        share = self.shares[number]
        # A sum that is added to a gradient, is followed by a trailer, or has less precision than
        # the master goes to this rank's row first and is moved after it has arrived (`_put`).
        stays = not (adds or carries or share.block.dtype != share.block.master)
        if stays and self.stage > 1:
            if share.gradient is None:
                share.gradient = torch.empty_like(share.master)
            return share.gradient
        # in place: no other rank reads this rank's row
        row = message.view(share.block.ranks, -1)[share.rank]
        if stays:  # in stage 1 the message stays allocated while its row is the gradient
            share.gradient = row
        return row

    def _take(self, number: int) -> list[Tensor | None]:
        """Return the gradients of a block and remove them from its parameters.

        The gradients are strided and without a graph; None for a missing gradient.
        """
        taken = take_gradients(self.shares[number].parameters)
        used = self._used[number]
        for index, gradient in enumerate(taken):
            if gradient is None:
                continue
            used.add(index)
            # With create_graph a gradient has a graph, which a sum over ranks cannot extend.
            if gradient.is_sparse or gradient.requires_grad:
                taken[index] = gradient.detach().to_dense()
        return taken

    def place_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the memory of a message in which a parameter's gradient can be computed.

        None if the gradient cannot be computed there (`dure.parallel.gradients_into_buckets`).
        """
        number = self._number_of.get(id(parameter))
        # Once until the message is sent: a second product would overwrite the first.
        if number is None or number == self.carrier or number in self._places:
            return None
        block = self.shares[number].block
        self._places[number] = self._room(block.padded, block.dtype)
        return self._places[number].view(block.shapes[0])

    def _alone(self, number: int) -> tuple[Tensor, bool, list[Tensor]]:
        """Return (message of a block of one parameter, whether its memory is the pool's, own).

        own: this rank's chunk, if the chunk is not in the message.
        """
        block = self.shares[number].block
        (taken,) = self._take(number)
        place = self._places.pop(number, None)
        gradient = _plain(taken).contiguous().view(-1) if taken is not None else None
        if place is not None and gradient is not None and gradient.data_ptr() == place.data_ptr():
            return place, True, []
        if place is not None and gradient is None:
            # autograd may have written there, and still waits for another part of the gradient
            self.pool.leave(place)
            place = None
        # Other ranks read this message in place: it has to be in the pool's shared memory.
        if self.wire.split_phase:
            place = place if place is not None else self._room(block.padded, block.dtype)
            if gradient is None:
                return place.zero_(), True, []
            return place, True, self._copy_for_others(number, gradient, place)
        if place is not None:
            # The gradient is in other memory, and is sent from there.
            self.pool.give(place)
        message = (
            gradient if gradient is not None else self.shares[number].own.new_zeros(block.padded)
        )
        return message, False, []

    def _copy_for_others(self, number: int, gradient: Tensor, message: Tensor) -> list[Tensor]:
        """Copy the part of a gradient that other ranks read to the message.

        Returns this rank's own chunk; an empty list if the chunk is copied too.
        """
        share = self.shares[number]
        if gradient.dtype != message.dtype:
            message.copy_(gradient)
            return []
        start = share.rank * share.block.chunk
        stop = (share.rank + 1) * share.block.chunk
        # all but this rank's own chunk, which no other rank reads
        if start:
            message[:start].copy_(gradient[:start])
        if stop < message.numel():
            message[stop:].copy_(gradient[stop:])
        return [gradient[start:stop]]

    def _send_alone(self, number: int, adds: bool) -> _Sent:
        share = self.shares[number]
        (message, pooled, own) = self._alone(number)
        into = self._into(number, message, adds, False)
        return _Sent(
            share=share,
            message=message,
            into=into,
            pooled=pooled,
            adds=adds,
            handle=self.wire.reduce_scatter(message, into, own),
        )

    def _send_rows(self, number: int, carries: bool, adds: bool) -> _Sent:
        share = self.shares[number]
        gradients = self._take(number)
        tail = self.trailer.length if carries else 0
        message = self._room(share.block.padded + share.block.ranks * tail, share.block.dtype)
        into = self._into(number, message, adds, carries)
        rows, begin = self._prepared_rows(number, tail, message, into)
        own = rows.fill(gradients)
        if tail:
            rows.say(self._said())
        return _Sent(
            share=share, message=message, into=into, pooled=True, adds=adds, handle=begin(own)
        )

    def _prepared_rows(self, number: int, tail: int, message: Tensor, into: Tensor) -> _Prepared:
        # The pool returns the same buffers in every step, so that nothing is prepared again after
        # the first steps.
        key = number, tail, message.data_ptr(), into.data_ptr()
        if key not in self._prepared:
            share = self.shares[number]
            rows = MessageRows(
                share.block,
                tail,
                message,
                # in split-phase the sum reads this rank's row from the gradients themselves
                share.rank if self.wire.split_phase and not tail else None,
            )
            self._prepared[key] = _Prepared(rows, self.wire.prepare_reduce_scatter(message, into))
        return self._prepared[key]

    def _room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the pool, after reclaiming messages that all ranks have read."""
        # `_give` returns messages that are still being read to the list.
        unread = self._unread
        self._unread = []
        for message, handle in unread:
            self._give(message, handle)
        return self.pool.take(elements, dtype)

    def _give(self, message: Tensor, handle: Handle[None]) -> None:
        """Return a message to the pool, now or when all ranks have read it."""
        if isinstance(handle, DeferredHandle) and not handle.is_read():
            self._unread.append((message, handle))
        else:
            self.pool.give(message)

    def _said(self) -> list[float]:
        """Return this rank's trailer, when all blocks before the last have been sent."""
        used: list[float] = []
        late: list[float] = []
        for number, share in enumerate(self.shares):
            left = 0  # gradients that missed the message of their block
            for index, gradient in enumerate(gradients_of(share.parameters)):
                left += gradient is not None
                # a late gradient counts as used: its sum is complete at the end of the pass
                used.append(float(gradient is not None or index in self._used[number]))
            # the carrier is being sent now, with all gradients of its block
            late.append(float(left > 0 and self._issued[number] and number != self.carrier))
        said = {**self._say(), "used": used}
        if self.stage == 3:
            said["late"] = late
        return list(map(float, self.trailer.encode(said)))

    def _settle(self, sent: _Sent) -> None:
        """Wait for a message and move its sum to its destination."""
        self.wire.wait(sent.handle, "gradients")
        stays = sent.into is sent.share.gradient
        if not stays:
            self._put(sent)
        # The gradient is a view of this message: its memory must not be reused before `drop`.
        if sent.pooled and stays and self.stage == 1:
            self._kept.append((sent.message, sent.handle))
        elif sent.pooled:
            self._give(sent.message, sent.handle)

    def _put(self, sent: _Sent) -> None:
        """Move a sum from this rank's row of the message to its destination."""
        share = sent.share
        chunk = sent.share.block.chunk
        reduced = sent.into[:chunk]
        if sent.into.numel() > chunk:
            # a copy, since the message goes back to the pool
            self._numbers = sent.into[chunk:].clone()
        if sent.adds:
            assert share.gradient is not None
            share.gradient.add_(reduced)
            return
        # In stage 1 an old gradient may be a view of a message, which must not be overwritten.
        if share.gradient is None or self.stage == 1:
            share.gradient = torch.empty_like(share.master)
        share.gradient.copy_(reduced)

    def finish(self) -> None:
        """Finish a pass: send late blocks, wait for sums, give the gradients to the optimizer."""
        # No block can carry the trailer: it is a separate message.
        if self.carrier is None and self.shares:
            device = self.shares[0].own.device
            self._numbers = torch.tensor(self._said(), dtype=torch.float32, device=device)
            self.wire.wait(self.wire.all_reduce(self._numbers), "the tail")
        self._settle_all()
        self._hear()
        # All ranks have the same sums of the trailer, so all send these blocks again, in the order
        # of their numbers.
        for number, late in enumerate(self.trailer_sums["late"]):
            if late > 0:
                self._send(number, False)
                self._settle_all()
        first = 0
        for share in self.shares:
            last = first + len(share.parameters)
            # A gradient that any rank has used is a sum on every rank; others stay None.
            share.give_gradients([ranks > 0 for ranks in self.trailer_sums["used"][first:last]])
            first = last
        self.passes += 1
        self.some_used = self.some_used or any(self.trailer_sums["used"])

    def _hear(self) -> None:
        """Decode the trailer."""
        if self._numbers is None:
            return
        numbers: list[float] = self._numbers.tolist()
        if self.wire.mean and self.carrier is not None:  # divided by N with the gradients
            numbers = [number * self.wire.group.size for number in numbers]
        self.trailer_sums = self.trailer.decode(numbers)

    def _settle_all(self) -> None:
        while self._sent:
            self._settle(self._sent.popleft())

    def local(self) -> list[Tensor]:
        """Return the gradients on this rank that have not been sent."""
        found = [gradient for share in self.shares for gradient in gradients_of(share.parameters)]
        return [gradient for gradient in found if gradient is not None]

    def drop(self) -> None:
        """Discard gradients that have not been sent.

        In stage 1 also the memory of sent gradients.
        """
        self.some_used = False
        for share in self.shares:
            drop_gradients(share.parameters)
            if self.stage == 1 and not share.accumulates():
                share.forget_gradient()
        # memory that `place_of` returned and whose gradients are discarded now
        for place in self._places.values():
            self.pool.give(place)
        self._places.clear()
        kept = self._kept
        self._kept = []
        for message, handle in kept:
            if any(
                share.gradient is not None and lies_in(share.gradient, message)
                for share in self.shares
            ):
                self._kept.append((message, handle))
            else:
                self._give(message, handle)


def _plain(gradient: Tensor) -> Tensor:
    """Return the tensor with any lazy conjugation or negation resolved in memory."""
    return gradient.resolve_conj().resolve_neg()


def lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
