"""Collectives of a group that spans hosts: shared memory within hosts, gloo between them.

The first rank of each host is its leader, and only leaders use the network for data that all ranks
share:

    all-reduce      sum within each host to its leader; leaders all-reduce; copy within each host
    reduce-scatter  sum within each host to its leader; leaders send each other the blocks of their
                    hosts; scatter
    all-gather      gather within each host; each leader sends its host's part to the other leaders;
                    copy within
    broadcast       within the root's host; leader to leaders; within the others

With two hosts every byte that has to cross the link crosses it once per direction. Individual data
between ranks (gather, scatter, all-to-all, messages) travels directly from rank to rank. Half
precision is summed in float32 and rounded once.

Before every call the leaders exchange their ranks' calls, so that all ranks detect the same
mismatch. Planned calls are the exception (`begin_all_reduce` and similar:
`dure.collectives.shared_memory.two_hosts.planned`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dure.collectives.shared_memory.calls import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    NUMBER_OF,
    REDUCE,
    REDUCE_SCATTER,
    SUM,
    CollectiveCall,
    bytes_of,
    mismatch,
    unequal,
)
from dure.collectives.shared_memory.host import TICK, ByteOffer, Host, PeerRead
from dure.collectives.shared_memory.loss_publication import LossPublication
from dure.collectives.shared_memory.portable import reduced
from dure.collectives.shared_memory.rendezvous import GroupRendezvous
from dure.collectives.shared_memory.torch_error_texts import not_in_time
from dure.collectives.shared_memory.two_hosts.duplex import (
    Duplex,
    PeerCallMismatchError,
    connection,
)
from dure.collectives.shared_memory.two_hosts.planned import (
    PlannedCall,
    PlannedCollectives,
    PlannedOverDuplex,
    PlannedOverGloo,
    reduce_options,
    settle,
    workable,
)
from dure.collectives.shared_memory.work import CallHandle
from dure.errors import PeerLostError
from dure.machine.group_key import group_key

_Gloo: Any = dist.ProcessGroupGloo  # torch's stubs are incomplete
_PATIENCE = 0.5  # seconds for ranks with better knowledge to publish the lost rank


def address_towards(store: Store) -> str | None:
    """Return the address by which this host reaches the store's host; None if unknown."""
    # Unwrap all prefix stores, down to the store that has a host.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    name = getattr(store, "host", None)
    port = getattr(store, "port", 1)
    if not name:
        return None
    with suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(
            name, port or 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # a datagram socket: nothing is sent
            # The kernel's source address; a loopback address means that the store is on this host.
            address = str(probe.getsockname()[0])
            return None if address.startswith("127.") or address == "::1" else address
    return None


def _elements(parts: Sequence[Tensor], ranks: Sequence[int]) -> int:
    return sum(parts[rank].numel() for rank in ranks)


def _together(parts: dict[int, Tensor], ranks: Sequence[int]) -> Tensor:
    """Return the parts of these ranks, concatenated."""
    return torch.cat([parts[rank] for rank in ranks]) if len(ranks) > 1 else parts[ranks[0]]


class PendingCall(NamedTuple):
    """Begun call.

    finish: waits for the end. ended: time of the end, in seconds of `time.perf_counter`, or 0.
    """

    finish: Callable[[], None]
    ended: Callable[[], float]


class InterHostCollectives:
    """Collectives of a rank, over its host and the network. Ranks are ranks of the group.

    hosts: the ranks of each host, in order. host: this rank's host. names: names of the ranks in
    errors.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        hosts: Sequence[Sequence[int]],
        host: Host,
        names: Sequence[int],
    ) -> None:
        self._rank = rank
        self._size = len(names)
        self._names = names
        self._hosts = hosts
        self._host = host
        self._here = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self._leads = hosts[self._here][0] == rank
        self._alone = len(hosts[self._here]) == 1  # on this host
        self._store = store
        self._verdict = LossPublication(store)
        self._number = 0
        address = address_towards(store)
        make = _Gloo.create_device
        options = _Gloo._Options()
        # gloo's own timeout is later than the timeout of `_wait`, whose error is more informative.
        options._timeout = timedelta(seconds=host.timeout + 2)
        options._devices = [make(hostname=address) if address else _Gloo.create_default_device()]
        self._options = options
        # A group of all ranks for data from rank to rank; a group of the leaders for the rest.
        self._all = _Gloo(PrefixStore("all", store), rank, self._size, options)
        self._leaders: Any = None
        if self._leads:
            store.set(f"address {self._here}", address or "unknown")
            self._leaders = self._group_of_leaders("leaders")
        self._planned = self._for_plans(address) if len(hosts) == self._size else None
        host.tell = self._verdict.tell
        host.remote = self._verdict.told
        # Leaders wait for each other and know the late rank: ranks that wait for a leader give it
        # time to publish the rank.
        host.grace = 0.0 if self._leads else 2 * _PATIENCE

    def _group_of_leaders(self, name: str) -> Any:
        return _Gloo(PrefixStore(name, self._store), self._here, len(self._hosts), self._options)

    def _for_plans(self, address: str | None) -> PlannedCollectives:
        """Return the carrier of planned calls: dure's connection between two hosts, else gloo."""
        if self._size == 2:
            meeting = GroupRendezvous(self._store, self._rank, self._names, self._host.timeout)
            made = connection(meeting, address, self._host.in_c, group_key())
            # Both ends know whether they are connected, so both fall back to gloo, or neither.
            if made is not None:
                return PlannedOverDuplex(Duplex(made, first=self._here == 0), self._here)
        return PlannedOverGloo(self._group_of_leaders("planned"), self._size)

    # Collectives, as `Host` has them.

    def all_reduce(self, tensor: Tensor, op: int, root: int = -1) -> None:
        self._agree(
            CollectiveCall(
                kind=ALL_REDUCE if root < 0 else REDUCE,
                dtype=NUMBER_OF[tensor.dtype],
                op=op,
                root=root,
                count=tensor.numel(),
            )
        )
        # Sum to the leader, over the leaders, and copy back to the ranks of each host.
        work, operation = workable(tensor, op)
        if root >= 0 and work.data_ptr() == tensor.data_ptr():
            work = work.clone()  # the tensor of a rank other than the root stays unchanged
        if not self._alone:
            self._host.all_reduce(work, operation, 0)
        if self._leads:
            self._between(lambda leaders: leaders.allreduce([work], reduce_options(operation)))
        self._share(work, 0)
        if root in (-1, self._rank):
            settle(work, op, tensor, self._size)

    def reduce_scatter(
        self, blocks: Sequence[Tensor], out: Tensor, op: int, call: CollectiveCall
    ) -> None:
        self._agree(call)
        work, operation = workable(torch.cat([block.view(-1) for block in blocks]), op)
        self._host.all_reduce(work, operation, 0)
        parts = torch.split(work, [block.numel() for block in blocks])
        here = self._hosts[self._here]
        mine = torch.cat([parts[rank] for rank in here])
        if self._leads:
            mine = self._reduced_over_hosts(parts, mine, operation)
        self._share(mine, 0)
        own = torch.split(mine, [parts[rank].numel() for rank in here])[self._host.members.rank]
        settle(own, op, out.view(-1), self._size)

    def _reduced_over_hosts(self, parts: Sequence[Tensor], mine: Tensor, operation: int) -> Tensor:
        """Return, on a leader, the reduction over all hosts for this host's ranks.

        Blocks are reduced in the order of hosts.
        """
        # Ranks of a host need not be consecutive: blocks are put in the order of hosts.
        leaving = torch.cat([parts[rank] for ranks in self._hosts for rank in ranks])
        lengths = [_elements(parts, ranks) for ranks in self._hosts]
        arriving = mine.new_empty(mine.numel() * len(self._hosts))
        own = [mine.numel()] * len(self._hosts)
        self._between(
            lambda leaders: leaders.alltoall_base(
                arriving, leaving, own, lengths, dist.AllToAllOptions()
            )
        )
        return reduced(list(arriving.view(len(self._hosts), -1)), operation)

    def exchange(
        self,
        call: CollectiveCall,
        parts: Sequence[Tensor],
        pulls: dict[int, PeerRead],
        deals: Sequence[ByteOffer] | None = None,
    ) -> None:
        self._agree(call, deals)
        if call.kind == BROADCAST:
            self._broadcast(call.root, parts[0] if parts else pulls[call.root].into)
        elif call.kind == ALL_GATHER:
            self._all_gather(parts[0], pulls)
        elif call.kind != BARRIER:
            self._to_each(parts, pulls, deals or ())

    def _broadcast(self, root: int, tensor: Tensor) -> None:
        flat = bytes_of(tensor)
        # First all ranks of the root's host get it; their leader then sends it to other leaders.
        if root in self._hosts[self._here]:
            self._share(flat, self._hosts[self._here].index(root))
        if self._leads:
            options = dist.BroadcastOptions()
            options.rootRank = next(
                index for index, ranks in enumerate(self._hosts) if root in ranks
            )
            self._between(lambda leaders: leaders.broadcast([flat], options))
        if root not in self._hosts[self._here]:
            self._share(flat, 0)

    def _all_gather(self, own: Tensor, pulls: dict[int, PeerRead]) -> None:
        flat = {rank: bytes_of(pull.into) for rank, pull in pulls.items()}
        mine = bytes_of(own)
        flat[self._rank] = mine
        here = self._hosts[self._here]
        near = {
            place: PeerRead(0, flat[rank]) for place, rank in enumerate(here) if rank != self._rank
        }
        self._host.exchange(CollectiveCall(ALL_GATHER), [mine], near)
        # A host's bytes, contiguous: the tensor itself for a host with a single rank, else a copy.
        wholes = [_together(flat, ranks) for ranks in self._hosts]
        if self._leads:
            self._swap(wholes)
        for index, (ranks, whole) in enumerate(zip(self._hosts, wholes, strict=True)):
            if index != self._here:
                self._share(whole, 0)
                parts = (
                    torch.split(whole, [flat[rank].numel() for rank in ranks])
                    if len(ranks) > 1
                    else ()
                )
                for rank, part in zip(ranks, parts, strict=False):
                    flat[rank].copy_(part)

    def _swap(self, wholes: Sequence[Tensor]) -> None:
        """Exchange, on a leader, each host's bytes with all others, both ways at once.

        wholes: the bytes of each host.
        """
        mine = wholes[self._here]
        lengths = [
            0 if index == self._here else whole.numel() for index, whole in enumerate(wholes)
        ]
        # An all-to-all takes a part for each receiver: the same part, copied for several.
        leaving = torch.cat([mine] * (len(wholes) - 1)) if len(wholes) > 2 else mine
        given = [0 if index == self._here else mine.numel() for index in range(len(wholes))]
        arriving = torch.empty(sum(lengths), dtype=torch.uint8)
        self._between(
            lambda leaders: leaders.alltoall_base(
                arriving, leaving, lengths, given, dist.AllToAllOptions()
            )
        )
        for whole, part in zip(wholes, torch.split(arriving, lengths), strict=True):
            if whole is not mine:
                whole.copy_(part)

    def _to_each(
        self, parts: Sequence[Tensor], pulls: dict[int, PeerRead], deals: Sequence[ByteOffer]
    ) -> None:
        """Send from rank to rank; the caller copies a rank's part for itself."""
        # The leading empty tensor is there because `cat` refuses an empty list.
        flat = torch.cat([torch.empty(0, dtype=torch.uint8), *(bytes_of(part) for part in parts)])
        others = [rank for rank in range(self._size) if rank != self._rank]
        # A rank's part for itself is left out: the parts for the others are consecutive.
        given = {rank: flat[deals[rank].offset :][: deals[rank].nbytes] for rank in others}
        leaving = torch.cat([given[rank] for rank in others])
        taken = [pulls[rank].into.nbytes if rank in pulls else 0 for rank in range(self._size)]
        arriving = torch.empty(sum(taken), dtype=torch.uint8)
        sizes = [given[rank].numel() if rank in given else 0 for rank in range(self._size)]
        self._wait(self._all.alltoall_base(arriving, leaving, taken, sizes, dist.AllToAllOptions()))
        for rank, part in enumerate(torch.split(arriving, taken)):
            if rank in pulls:
                bytes_of(pulls[rank].into).copy_(part)

    def _share(self, tensor: Tensor, place: int) -> None:
        """Copy the tensor of the rank at position `place` to all ranks of this host."""
        if self._alone:
            return
        call = CollectiveCall(
            kind=BROADCAST, dtype=NUMBER_OF[tensor.dtype], op=0, root=place, count=tensor.numel()
        )
        if self._host.members.rank == place:
            self._host.exchange(call, [tensor], {})
        else:
            self._host.exchange(call, [], {place: PeerRead(0, tensor)})

    # Where every rank has a host of its own, and knows that all begin the same.

    @property
    def _plans(self) -> PlannedCollectives:
        """Carrier of planned calls. Raises PeerLostError if the group has ended."""
        assert self._planned is not None, "some host has several ranks"
        # Planned calls do not ask the others, so the end of the group has to be checked here.
        loss = self._host.aborted()
        if loss is not None:
            raise loss
        return self._planned

    def begin_all_reduce(self, tensor: Tensor, op: int) -> PendingCall:
        call = CollectiveCall(
            kind=ALL_REDUCE, dtype=NUMBER_OF[tensor.dtype], op=op, root=-1, count=tensor.numel()
        )
        return self._begun(call, self._plans.all_reduce(call, tensor, op))

    def begin_reduce_scatter(self, source: Tensor, out: Tensor, op: int) -> PendingCall:
        """Begin a planned reduce-scatter. source: contiguous, a block for each rank."""
        call = CollectiveCall(
            kind=REDUCE_SCATTER, dtype=NUMBER_OF[out.dtype], op=op, root=-1, count=source.numel()
        )
        return self._begun(call, self._plans.reduce_scatter(call, source, out, op))

    def begin_all_gather(self, whole: Tensor, own: Tensor) -> PendingCall:
        """Begin a planned all-gather.

        whole: contiguous, a block for each rank; own: contiguous, possibly its block in `whole`.
        """
        call = CollectiveCall(
            kind=ALL_GATHER, dtype=NUMBER_OF[own.dtype], op=0, root=-1, count=own.numel()
        )
        return self._begun(call, self._plans.all_gather(call, whole, own))

    def _begun(self, call: CollectiveCall, carried: PlannedCall) -> PendingCall:
        """Return a planned call in progress, whose end raises MismatchError or PeerLostError."""
        self._number += 1
        number = self._number

        def finish() -> None:
            self._host.doing = str(call), f"call {number}"
            try:
                self._wait(carried.work)
            except PeerCallMismatchError as unlike:
                # In the order of ranks, so that both ends raise the same: [::-1] on the second end.
                raise mismatch(
                    number, [call, unlike.theirs][:: 1 - 2 * self._here], self._names
                ) from None
            carried.then()

        return PendingCall(finish, carried.ended)

    @property
    def apart(self) -> bool:
        """Whether every rank has a separate host."""
        return self._planned is not None

    def close(self) -> None:
        """Close the connections; calls in progress fail."""
        if self._planned is not None:
            self._planned.close()

    def abandon(self) -> None:
        """Detach from the connections in a forked child."""
        if self._planned is not None:
            self._planned.abandon()

    # Agreement.

    def _agree(self, call: CollectiveCall, deals: Sequence[ByteOffer] | None = None) -> None:
        """Raise the same MismatchError on every rank unless all ranks make the same call."""
        self._number += 1
        self._host.doing = (str(call), f"call {self._number}")
        # A row for each rank: its call, then its deals with each rank, or zeros. Within a host the
        # rows are gathered; the sum of the leaders' tables, zeros elsewhere, is the whole table.
        dealt = [number for deal in deals or () for number in (deal.nbytes, deal.wanted)]
        row = [call.kind, call.dtype, call.op, call.root, call.count, call.extra, *dealt]
        width = 6 + 2 * self._size
        own = torch.tensor(row + [0] * (width - len(row)))
        table = torch.zeros(self._size, width, dtype=torch.int64)
        table[self._rank] = own
        pulls = {
            place: PeerRead(0, table[rank]) for place, rank in enumerate(self._hosts[self._here])
        }
        del pulls[self._host.members.rank]
        self._host.exchange(
            CollectiveCall(ALL_GATHER, NUMBER_OF[torch.int64], count=width), [own], pulls
        )
        if self._leads:
            self._between(lambda leaders: leaders.allreduce([table], reduce_options(SUM)))
        self._share(table, 0)
        self._compare(table)

    def _compare(self, table: Tensor) -> None:
        """Raise MismatchError unless all rows of the table agree. table: as in `_agree`."""
        rows = table[:, :6].tolist()
        calls = [CollectiveCall(*row) for row in rows]
        if len({(c.kind, c.dtype, c.op, c.root, c.extra) for c in calls}) > 1:
            raise mismatch(self._number, calls, self._names)
        # Only for kinds up to BROADCAST do all ranks have the same count.
        if calls[0].kind <= BROADCAST and len({c.count for c in calls}) > 1:
            raise mismatch(self._number, calls, self._names)
        deals = table[:, 6:].view(self._size, self._size, 2)
        if not torch.equal(deals[:, :, 0], deals[:, :, 1].T):
            raise unequal(
                self._number, calls[0], lambda i, j: tuple(deals[i, j].tolist()), self._names
            )

    # The network, and who is lost there.

    def _between(self, call: Callable[[Any], Any]) -> None:
        """Run a collective of the leaders."""
        self._wait(call(self._leaders))

    def _wait(self, work: Any) -> None:
        """Wait for gloo or the connection. Raises PeerLostError, which ends the group."""
        start = time.monotonic()
        over = False
        while True:
            try:
                work.wait(timedelta(seconds=TICK))
                return
            except RuntimeError as error:
                # A tick is over, or the work has failed: both raise RuntimeError. A loss published
                # by other ranks is more informative than this end's error.
                loss = self._host.aborted() or self._verdict.told()
                if loss is None and over:
                    loss = self._closed(str(error))
                over = work.is_completed()  # in time after all, or failed: the next wait shows it
                if loss is None and time.monotonic() - start >= self._host.timeout + _PATIENCE:
                    others = [
                        ranks[0] for index, ranks in enumerate(self._hosts) if index != self._here
                    ]
                    loss = self._loss(others, not_in_time(self._host.timeout))
                if loss is not None:
                    # Late data must not be written to tensors that are used again.
                    self.close()
                    raise self._host.abort(loss) from error

    def _closed(self, reason: str) -> PeerLostError:
        """Return the error for a failed connection.

        The ranks of the other host know best which rank they lost, if any of them is alive.
        """
        # When a rank is lost, many connections break. A rank that saw its death publishes it in
        # this time.
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            told = self._verdict.told()
            if told is not None:
                return told
            time.sleep(TICK / 2)
        others = [index for index in range(len(self._hosts)) if index != self._here]
        # gloo's text names the address of the peer, but no rank.
        named = [index for index in others if self._address_of(index) in reason] or others
        return self._loss([self._hosts[index][0] for index in named], "closed its connection")

    def _address_of(self, index: int) -> str:
        try:
            return bytes(self._store.get(f"address {index}")).decode()
        except RuntimeError:
            return "unknown"

    def _loss(self, ranks: Sequence[int], reason: str) -> PeerLostError:
        """Return the error for ranks that are lost to the current call."""
        operation, step = self._host.doing or ("a call", "this group")
        return PeerLostError(tuple(self._names[rank] for rank in ranks), operation, step, reason)

    def send(self, tensor: Tensor, to: int, tag: int) -> CallHandle:
        """Send to a rank of another host."""
        dense = tensor.contiguous()
        return InterHostMessage(
            across=self,
            work=self._all.send([dense], to, tag),
            dense=dense,
            peer=to,
            name=f"send(to rank {self._names[to]}, tag {tag})",
        )

    def receive(self, tensor: Tensor, source: int, tag: int) -> CallHandle:
        """Receive from a rank of another host."""
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        name = f"recv(from rank {self._names[source]}, tag {tag})"
        return InterHostMessage(
            across=self,
            work=self._all.recv([dense], source, tag),
            dense=dense,
            peer=source,
            name=name,
            into=tensor,
        )

    @property
    def timeout(self) -> float:
        return self._host.timeout

    def lost(self, peer: int, operation: str, reason: str) -> PeerLostError:
        """Return the error for a failed message, and end the group."""
        told = self._host.aborted() or self._verdict.told()
        step = f"call {self._number}"
        return self._host.abort(
            told or PeerLostError((self._names[peer],), operation, step, reason)
        )


class InterHostMessage(CallHandle):
    """Message to or from another host, over gloo.

    A thread waits for it, because gloo cannot be polled. `work` is gloo's operation with `peer`.
    into: destination of received data in `dense`, if it has another layout.
    """

    def __init__(
        self,
        across: InterHostCollectives,
        work: Any,
        dense: Tensor,
        peer: int,
        name: str,
        into: Tensor | None = None,
    ) -> None:
        super().__init__([dense if into is None else into])

        def carry() -> None:
            try:
                work.wait(timedelta(seconds=across.timeout))
            except RuntimeError as error:
                # gloo has no error class for it; the T may be large or small.
                silent = "imed out" in str(error)
                reason = not_in_time(across.timeout) if silent else "closed its connection"
                self.finish(across.lost(peer, name, reason))
                return
            if into is not None and into is not dense:
                # As in queued calls: `into` may be a parameter.
                with torch.inference_mode():
                    into.copy_(dense)
            self.finish()

        threading.Thread(target=carry, name="dure parcel", daemon=True).start()
