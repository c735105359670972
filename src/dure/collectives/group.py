"""A group: the ranks that take part in a collective, and the sends and receives between them.

It stands on any torch.distributed process group, counts every payload byte, and turns a failed
transfer into an error that names the lost rank, the operation and the step. A group of one needs no
torch.distributed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.arguments import check_rank, check_root
from dure.collectives.handle import Handle, Line
from dure.collectives.hosts import Hosts, name_of_this_host, number_of, partition_by
from dure.collectives.transport import Message, Pending, backend_name, transport_of
from dure.errors import MismatchError, PeerLostError
from dure.record.meter import Meter
from dure.tensors.elements import element_bytes

Value = TypeVar("Value")

Diagnose = Callable[[str, str, "int | None", Exception], "PeerLostError | None"]
"""diagnose(operation, step, peer, error) finds out which peer was lost, if any; worlds know how."""


def done_already() -> None:
    """The end of a transfer that was done when it had begun."""


_Started = tuple[int, Pending]
"""A peer, and what is under way with it."""


class _Shared:
    """What all groups over one process group share: the order of operations, what was found out."""

    def __init__(self) -> None:
        self.line = Line()
        self.hosts: Hosts | None = None
        self.connected = False
        self.peer: int | None = None
        """The global rank of the other end of the current transfer: blamed if that fails."""


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


def _shared_of(process_group: dist.ProcessGroup | None) -> _Shared:
    """What the groups over this process group share; of a single rank, something new."""
    if process_group is None:
        return _Shared()
    # Two threads may come at once: `setdefault` gives both the same one.
    known = _shared.get(process_group)
    return known if known is not None else _shared.setdefault(process_group, _Shared())


def settle(process_group: dist.ProcessGroup) -> None:
    """Waits until all operations that `Group`s have issued on a process group have ended."""
    known = _shared.get(process_group)
    if known is not None:
        known.line.settle()


class _During:
    """`Group.during`: a class, because it is entered in backward passes, twice a message."""

    __slots__ = ("_before", "_group", "_operation", "_step")

    def __init__(self, group: Group, operation: str, step: str | None) -> None:
        self._group = group
        self._operation = operation
        self._step = step

    def __enter__(self) -> None:
        group = self._group
        self._before = group.operation
        group.operation = self._operation
        # The rank that was waited for last has nothing to do with what may fail now.
        group._shared.peer = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        group = self._group
        try:
            # RuntimeError is all that c10d raises when a transfer fails; a mismatch says already
            # all that can be known
            if isinstance(error, RuntimeError) and not isinstance(error, MismatchError):
                lost = group._diagnosed(error, group.step if self._step is None else self._step)
                if lost is not None:
                    raise lost from error
        finally:
            group.operation = self._before


class _At:
    """What a group is at; its copies, which have fewer ranks or another meter, are at the same."""

    __slots__ = ("step",)

    def __init__(self, step: str) -> None:
        self.step = step


class Group:
    """The ranks 0 … size-1 of a process group, seen from `rank`.

    process_group: a torch.distributed group; None for a group of one.
    meter: counts what this rank sends.
    diagnose: called when a transfer fails; by default torch.distributed's error goes on as it is.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        meter: Meter | None = None,
        diagnose: Diagnose | None = None,
    ) -> None:
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group) if process_group is not None else 0
        self.size: int = dist.get_world_size(process_group) if process_group is not None else 1
        self.meter = meter if meter is not None else Meter(f"rank {self.rank}")
        self.operation = "a transfer"
        self._at = _At("the start")
        self._diagnose = diagnose
        self.transport = transport_of(process_group)
        self._shared = _shared_of(process_group)
        self._global = (
            dist.get_process_group_ranks(process_group) if process_group is not None else [0]
        )
        # Errors name ranks of the whole job; transports count places in the process group.
        self._places = list(range(self.size))

    @classmethod
    def default(cls) -> Group:
        """All ranks of the job, or this process alone if torch.distributed is not initialised."""
        return cls(dist.group.WORLD if dist.is_initialized() else None)

    @classmethod
    def of(cls, group: Group | dist.ProcessGroup | None) -> Group:
        """The group that is meant.

        A `Group` is itself; of torch.distributed's, a group over it; None is `default`. Raises
        ValueError for anything else, and where this process is not in the group.
        """
        if isinstance(group, Group):
            return group
        if group is None:
            return cls.default()
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"this process is not in the group, or it is none: {group!r}")
        return cls(group)

    @property
    def step(self) -> str:
        """What the group is at, for errors: "step 12"."""
        return self._at.step

    @step.setter
    def step(self, step: str) -> None:
        self._at.step = step

    def global_rank(self, rank: int) -> int:
        """The rank in the whole job of a rank of this group."""
        check_rank(rank, self.size)
        return self._global[rank]

    def among(self, ranks: Sequence[int]) -> Group:
        """The group of these ranks of mine, in this order, for transfers only.

        This rank is one of them. Raises ValueError if it is not, and for a rank that there is not,
        or that is there twice.
        """
        for rank in ranks:
            check_rank(rank, self.size)
        if len(set(ranks)) < len(ranks) or self.rank not in ranks:
            raise ValueError(
                f"a group of the ranks {list(ranks)}: each is there once, and rank {self.rank}, "
                f"which asks for it, is one of them"
            )
        # Shallow: meter, transport and the order of operations are shared with the whole group.
        part = copy.copy(self)
        part.rank = ranks.index(self.rank)
        part.size = len(ranks)
        part._global = [self._global[rank] for rank in ranks]
        part._places = [self._places[rank] for rank in ranks]
        return part

    def parted(self, parts: Sequence[Sequence[int]]) -> Group:
        """The one of these groups of my ranks that this rank is in, for transfers and collectives.

        All ranks call it together, with the same parts, of which each rank is in one. It counts on
        the same meter. Raises ValueError unless each rank is in one part.
        """
        if sorted(rank for part in parts for rank in part) != list(range(self.size)):
            raise ValueError(
                f"parts are {[list(part) for part in parts]}, but each of the ranks 0 to "
                f"{self.size - 1} is in one"
            )
        mine = next(list(part) for part in parts if self.rank in part)
        if len(mine) == self.size:
            return self
        own: Group | None = None
        for part in parts:
            if len(part) > 1:
                ranks = [self._global[rank] for rank in part]
                # Every rank makes every group, also those that it is not in: torch wants it so.
                limit = dist.distributed_c10d._get_default_store().timeout  # type: ignore[attr-defined]
                made = dist.new_group(ranks, timeout=limit, use_local_synchronization=False)
                if self.rank in part:
                    own = Group(made, self.meter, self._diagnose)
        if own is None:
            own = Group(None, self.meter)
            own._global = [self._global[self.rank]]
        return own

    def alone(self) -> Group:
        """This rank without the others, with the same meter."""
        return Group(None, self.meter)

    def unmetered(self) -> Group:
        """The same ranks with a meter of their own, for what only a measurement exchanges."""
        part = copy.copy(self)
        part.meter = Meter(self.meter.name)
        return part

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, the meter counts nothing: for layers that hold this group, where they measure."""
        # What was issued before is counted, and what is issued inside has ended before it counts.
        self.settle()
        meter = self.meter
        self.meter = Meter(meter.name)
        try:
            yield
        finally:
            self.settle()
            self.meter = meter

    def hosts(self) -> Hosts:
        """Who shares a host (`dure.collectives.hosts`). All ranks call it together.

        It is found out once for each process group.
        """
        # All groups over one process group share the answer, so all ranks ask or none does.
        if self._shared.hosts is None:
            numbers = self.all_gather_values(
                [number_of(name_of_this_host())], "finding out who shares a host"
            )
            self._shared.hosts = partition_by([number for (number,) in numbers])
        return self._shared.hosts

    def backend(self, device: torch.device) -> str:
        """The name of torch's backend for tensors of this device, such as "gloo".

        It is empty if there is none.
        """
        if self.process_group is None:
            return ""
        return backend_name(self.process_group, device)

    @overload
    def perform(self, operation: str, work: Callable[[], Value], tensor: Tensor) -> Value: ...
    @overload
    def perform(
        self, operation: str, work: Callable[[], Value], tensor: Tensor, async_op: bool
    ) -> Value | Handle[Value]: ...
    def perform(
        self, operation: str, work: Callable[[], Value], tensor: Tensor, async_op: bool = False
    ) -> Value | Handle[Value]:
        """Does `work` after all that was issued before: now, or alongside the program.

        operation: its name, for errors. tensor: one of those that travel; on a GPU the work is
        queued on the stream that is current here.
        """
        # As they are at the time of the call: on the other thread they may have changed since.
        step = self.step
        inference = torch.is_inference_mode_enabled()

        def here() -> Value:
            with torch.no_grad(), _During(self, operation, step):
                if tensor.is_cuda:
                    self._connect(tensor.device)
                return work()

        if not async_op:
            self.settle()
            return here()
        # The work has to come after what the caller has queued on its stream.
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

        def there() -> Value:  # modes, devices and streams are a thread's own
            with (
                torch.inference_mode(inference),
                torch.cuda.stream(stream) if stream is not None else nullcontext(),
            ):
                return here()

        return self._shared.line.put(there)

    def settle(self) -> None:
        """Waits until all operations that were issued on this process group have ended."""
        line = self._shared.line
        if line.thread is not None:
            line.settle()

    def _connect(self, device: torch.device) -> None:
        """Makes all ranks take part in the first call on NCCL, as torch wants it.

        Later some of them may transfer alone.
        """
        if not self._shared.connected and self.backend(device) == "nccl":
            dist.all_reduce(torch.zeros(1, device=device), group=self.process_group)
            self._shared.connected = True

    def during(self, operation: str, step: str | None = None) -> _During:
        """Names what the group does, for errors; transfers that fail inside are diagnosed.

        step: what the operation belongs to, if that is not what the group is at.
        """
        return _During(self, operation, step)

    def _diagnosed(self, error: Exception, step: str) -> PeerLostError | None:
        return (
            self._diagnose(self.operation, step, self._shared.peer, error)
            if self._diagnose is not None
            else None
        )

    def holds(self, messages: int, nbytes: int) -> bool:
        """Whether so many messages, of `nbytes` together, leave at once.

        They lie with their receiver until it asks for them.
        """
        return self.transport.holds(messages, nbytes)

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends a contiguous tensor to rank `to` and waits until it may be changed again."""
        self.transfer([(tensor, to)], [])

    def receive(self, into: Tensor, source: int) -> None:
        """Fills the contiguous tensor `into` with what rank `source` sends."""
        self.transfer([], [(into, source)])

    def exchange(self, tensor: Tensor, to: int, into: Tensor, source: int) -> None:
        """Sends to one rank while receiving from another; empty tensors do not travel."""
        self.transfer([(tensor, to)], [(into, source)])

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives all of these at once.

        They are pairs of a contiguous tensor and a rank, all on one device.

        Between two ranks they arrive in the order of sending. Empty tensors do not travel.
        """
        for _, rank in (*sends, *receives):
            check_rank(rank, self.size)
        # Both ends leave empty ones out, so nobody waits for one.
        sends = [message for message in sends if message[0].numel()]
        receives = [message for message in receives if message[0].numel()]
        if not sends and not receives:
            return
        device = (sends or receives)[0][0].device
        if device.type == "cpu":
            self._transfer(sends, receives)
        elif self.transport.reaches(device):
            self._transfer_in_a_batch(sends, receives)
        else:
            self._transfer_by_way_of_memory(sends, receives)
        for tensor, _ in sends:
            self.meter.sent(tensor.nbytes)
        for into, _ in receives:
            self.meter.received(into.nbytes)

    def _transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """`transfer` of tensors of the CPU, none of them empty."""
        # From several sources: all are asked for before any is waited for, which may be slow.
        if len(receives) > 1 and len({source for _, source in receives}) > 1:
            self._wait(self._start(sends, receives))
            return
        # From one source, one after another, nothing has to be asked for ahead of its turn.
        shared = self._shared
        posted = self._post(sends)
        for into, source in receives:
            shared.peer = self._global[source]
            self.transport.fetch(into, self._places[source])
        if posted:
            self._wait(posted)

    def _post(self, sends: Sequence[Message]) -> list[_Started]:
        """Begins to send; what has not left at once."""
        shared = self._shared
        posted: list[_Started] = []
        for tensor, to in sends:
            shared.peer = self._global[to]
            pending = self.transport.post(tensor, self._places[to])
            if pending is not None:  # else all of it has left already
                posted.append((to, pending))
        return posted

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[_Started]:
        """Begins all sends and receives; what is still under way."""
        posted = self._post(sends)
        expected: list[_Started] = []
        for into, source in receives:
            self._shared.peer = self._global[source]
            expected.append((source, self.transport.expect(into, self._places[source])))
        return expected + posted

    def _wait(self, started: Sequence[_Started]) -> None:
        # One after another; the one that is waited for when it fails is blamed (`_diagnosed`).
        for peer, pending in started:
            self._shared.peer = self._global[peer]
            pending.wait()

    def begin_transfer(
        self, operation: str, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[], None]:
        """`transfer`, alongside the program: what is returned waits for its end.

        operation: its name, for errors. Between two ranks messages arrive in the order in which
        they were begun. Tensors of a GPU travel by way of the CPU's memory.
        """
        for _, rank in (*sends, *receives):
            check_rank(rank, self.size)
        sends = [
            (tensor if tensor.is_cpu else tensor.cpu(), to)
            for tensor, to in sends
            if tensor.numel()
        ]
        receives = [(into, source) for into, source in receives if into.numel()]
        arrivals = [
            (torch.empty_like(into, device="cpu") if into.is_cuda else into, peer)
            for into, peer in receives
        ]
        step = self.step
        with self.during(operation):
            started = self._start(sends, arrivals)
        for tensor, _ in sends:
            self.meter.sent(tensor.nbytes)
        if not started:
            return done_already

        def end() -> None:
            with self.during(operation, step):
                self._wait(started)
            # `arrived` is `into` on the CPU; on a GPU the tensor of memory that it passed through.
            for (into, _), (arrived, _) in zip(receives, arrivals, strict=True):
                if arrived is not into:
                    into.copy_(arrived)
                self.meter.received(into.nbytes)

        return end

    def _transfer_by_way_of_memory(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        """For a backend that sends from the memory of the CPU only."""
        arrivals = [(torch.empty_like(into, device="cpu"), source) for into, source in receives]
        self._transfer([(tensor.cpu(), to) for tensor, to in sends], arrivals)
        for (into, _), (arrived, _) in zip(receives, arrivals, strict=True):
            into.copy_(arrived)

    def _transfer_in_a_batch(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """For a backend that sends from the device's own memory."""
        places = self._places
        self.transport.transfer_there(
            [(tensor, places[to]) for tensor, to in sends],
            [(into, places[source]) for into, source in receives],
        )

    def all_gather_values(
        self, values: list[float], operation: str = "all-gather of measurements"
    ) -> list[list[float]]:
        """Every rank's list of numbers, in order of rank; all lists have the same length.

        Bookkeeping such as metrics and counters: in float64, not counted by the meter. operation:
        for errors.
        """
        if self.size == 1:
            return [values]
        self.settle()
        device = self._carried_on({torch.device("cpu")})
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        with self.during(operation):
            dist.all_gather(gathered, mine, group=self.process_group)
        return [part.tolist() for part in gathered]

    @torch.no_grad()
    def broadcast_values(
        self, tensors: Sequence[Tensor], counted: bool = True, root: int = 0
    ) -> None:
        """The root's tensors into every rank's, in place, as one message: any dtype and stride.

        counted: whether the meter counts it, as N-1 messages of the root.
        """
        check_root(root, self.size)
        if self.size == 1 or not tensors:
            return
        self.settle()
        travels = self._carried_on({tensor.device for tensor in tensors})
        message = torch.cat([element_bytes(tensor).to(travels) for tensor in tensors])
        with self.during("broadcast of buffers"):
            dist.broadcast(message, self._global[root], group=self.process_group)
        if self.rank == root:
            for _ in range(self.size - 1 if counted else 0):
                self.meter.sent(message.nbytes)
            return
        if counted:
            self.meter.received(message.nbytes)
        start = 0
        for tensor in tensors:
            # A copy, since a dtype wants its bytes at a multiple of its size.
            arrived = (
                message[start : start + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
            )
            start += tensor.nbytes
            arrived = arrived.to(tensor.device)
            # An expanded tensor cannot be written, and never changes.
            if not torch.equal(arrived, tensor):
                tensor.copy_(arrived)

    def _carried_on(self, devices: set[torch.device]) -> torch.device:
        """Where tensors of these devices travel as one message: their own device if they can."""
        (first, *others) = devices
        if not others and self.backend(first):
            return first
        # Where NCCL is the only backend, it is a GPU.
        return torch.device("cpu" if self.backend(torch.device("cpu")) else "cuda")

    def broadcast_bytes(self, content: bytes | None) -> bytes:
        """Rank 0's `content` on every rank. Bookkeeping, not counted by the meter."""
        if self.size == 1:
            return content or b""
        self.settle()
        # Only rank 0 knows how long it is: first the length, then the bytes.
        length = torch.tensor([len(content) if content is not None else 0])
        with self.during("broadcast of the run's state"):
            dist.broadcast(length, self._global[0], group=self.process_group)
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == 0 and content:
                buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            if buffer.numel():
                dist.broadcast(buffer, self._global[0], group=self.process_group)
        return buffer.numpy().tobytes()

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's `content`, on rank 0 in order of rank; elsewhere an empty list.

        Not counted by the meter.
        """
        if self.size == 1:
            return [content]
        lengths = [int(length) for (length,) in self.all_gather_values([float(len(content))])]
        with self.during("gather of the timelines"):
            if self.rank != 0:
                # At least one byte, because `frombuffer` refuses none; rank 0 cuts it off.
                mine = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
                dist.send(mine, self._global[0], group=self.process_group)
                return []
            parts = [content]
            for source in range(1, self.size):
                buffer = torch.empty(max(1, lengths[source]), dtype=torch.uint8)
                dist.recv(buffer, self._global[source], group=self.process_group)
                parts.append(buffer.numpy().tobytes()[: lengths[source]])
        return parts
