"""Group: the ranks of a collective, and the sends and receives between them.

A group uses any torch.distributed process group, counts every payload byte, and turns a failed
transfer into an error that names the lost rank, the operation and the step. A group of a single
rank needs no torch.distributed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.arguments import check_rank, check_root
from dure.collectives.device_channels import DeviceChannels, connect_neighbours
from dure.collectives.handle import Handle, OperationQueue
from dure.collectives.hosts import Hosts, name_of_this_host, number_of, partition_by
from dure.collectives.transport import Message, Pending, backend_name, transport_of
from dure.errors import MismatchError, PeerLostError
from dure.machine.devices import CPU, accelerator, current_stream, indexed, on_stream, pinned_like
from dure.record.meter import Meter
from dure.tensors.elements import element_bytes

Value = TypeVar("Value")

Diagnose = Callable[[str, str, "int | None", Exception], "PeerLostError | None"]
"""diagnose(operation, step, peer, error) returns the error of the lost peer, if any.

Worlds provide the function.
"""


def done_already() -> None:
    """Do nothing: the end of a transfer that was complete at its beginning."""


_Started = tuple[int, Pending]
"""Peer, and the pending operation with the peer."""


class _Shared:
    """State common to all groups over a process group: the order of operations, and the hosts."""

    def __init__(self) -> None:
        self.line = OperationQueue()
        self.hosts: Hosts | None = None
        self.connected = False
        self.peer: int | None = None
        """Global rank at the other end of the current transfer: blamed if the transfer fails."""


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


def _shared_of(process_group: dist.ProcessGroup | None) -> _Shared:
    """Return the common state of the groups over this process group; new for a single rank."""
    if process_group is None:
        return _Shared()
    # Two threads may arrive at once: `setdefault` gives both the same object.
    known = _shared.get(process_group)
    return known if known is not None else _shared.setdefault(process_group, _Shared())


def settle(process_group: dist.ProcessGroup) -> None:
    """Wait until all operations that `Group`s have issued on a process group have ended."""
    known = _shared.get(process_group)
    if known is not None:
        known.line.settle()


class _During:
    """Context manager of `Group.during`: a class for speed, entered twice a message in backward."""

    __slots__ = ("_before", "_group", "_operation", "_step")

    def __init__(self, group: Group, operation: str, step: str | None) -> None:
        self._group = group
        self._operation = operation
        self._step = step

    def __enter__(self) -> None:
        group = self._group
        self._before = group.operation
        group.operation = self._operation
        # The previous transfer's peer must not be blamed for a failure of this operation.
        group._shared.peer = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        group = self._group
        try:
            # c10d raises only RuntimeError for a failed transfer; MismatchError needs no diagnosis.
            if isinstance(error, RuntimeError) and not isinstance(error, MismatchError):
                lost = group._diagnosed(error, group.step if self._step is None else self._step)
                if lost is not None:
                    raise lost from error
        finally:
            group.operation = self._before


class _At:
    """Mutable step name that a group shares with its copies (fewer ranks or another meter)."""

    __slots__ = ("step",)

    def __init__(self, step: str) -> None:
        self.step = step


class Group:
    """Ranks 0 … size-1 of a process group, seen from `rank`.

    process_group: a torch.distributed group; None for a group of a single rank.
    device_group: a torch.distributed group of the same ranks for tensors of their devices, such as
    NCCL's; without one they travel through the CPU's memory, unless `process_group` reaches them.
    meter: counts the bytes that this rank sends.
    diagnose: called when a transfer fails; by default torch.distributed's error is raised
    unchanged.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        meter: Meter | None = None,
        diagnose: Diagnose | None = None,
        device_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.process_group = process_group
        self.device_group = device_group
        self.rank: int = dist.get_rank(process_group) if process_group is not None else 0
        self.size: int = dist.get_world_size(process_group) if process_group is not None else 1
        self.meter = meter if meter is not None else Meter(f"rank {self.rank}")
        self.operation = "a transfer"
        self._at = _At("the start")
        self._diagnose = diagnose
        self.transport = transport_of(process_group)
        self._device_transport = transport_of(device_group or process_group)
        self._shared = _shared_of(process_group)
        self._global = (
            dist.get_process_group_ranks(process_group) if process_group is not None else [0]
        )
        # Errors name ranks of the whole job; transports use ranks of the process group.
        self._places = list(range(self.size))
        self._channels: DeviceChannels | None = None

    @classmethod
    def default(cls) -> Group:
        """Return all ranks of the job, or this process alone without torch.distributed."""
        return cls(dist.group.WORLD if dist.is_initialized() else None)

    @classmethod
    def of(cls, group: Group | dist.ProcessGroup | None) -> Group:
        """Return the `Group` for an argument of a collective.

        A `Group` is returned unchanged; a group of torch.distributed is wrapped; None is `default`.
        Raises ValueError for any other object, and if this process is not in the group.
        """
        if isinstance(group, Group):
            return group
        if group is None:
            return cls.default()
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"this process is not in the group, or the group is invalid: {group!r}"
            )
        return cls(group)

    @property
    def step(self) -> str:
        """Step of the group, for errors: "step 12"."""
        return self._at.step

    @step.setter
    def step(self, step: str) -> None:
        self._at.step = step

    def global_rank(self, rank: int) -> int:
        """Return the rank in the whole job of a rank of this group."""
        check_rank(rank, self.size)
        return self._global[rank]

    def among(self, ranks: Sequence[int]) -> Group:
        """Return the group of these ranks of this group, in this order, for transfers only.

        This rank has to be included. Raises ValueError if it is not, and for unknown or repeated
        ranks.
        """
        for rank in ranks:
            check_rank(rank, self.size)
        if len(set(ranks)) < len(ranks) or self.rank not in ranks:
            raise ValueError(
                f"the ranks of a group are {list(ranks)}, but each has to occur once, and rank "
                f"{self.rank}, which creates it, has to be one of them"
            )
        # A shallow copy: meter, transport and the order of operations are shared with the group.
        part = copy.copy(self)
        part.rank = ranks.index(self.rank)
        part.size = len(ranks)
        part._global = [self._global[rank] for rank in ranks]
        part._places = [self._places[rank] for rank in ranks]
        return part

    def split_into(self, parts: Sequence[Sequence[int]], connected: bool = False) -> Group:
        """Return the part that contains this rank, as a group for transfers and collectives.

        All ranks call it together with the same parts, a partition of the ranks. The result uses
        the same meter. Raises ValueError unless each rank is in exactly one part.

        connected: whether neighbours of a part, as a ring, get channels between their devices
        (`dure.collectives.device_channels`), which `begin_transfer` uses.
        """
        if sorted(rank for part in parts for rank in part) != list(range(self.size)):
            raise ValueError(
                f"parts are {[list(part) for part in parts]}, but each of the ranks 0 to "
                f"{self.size - 1} has to be in exactly one"
            )
        if self.size == 1:
            return self
        mine = next(list(part) for part in parts if self.rank in part)
        # torch requires every rank to create every group, also groups without the rank.
        limit = dist.distributed_c10d._get_default_store().timeout  # type: ignore[attr-defined]
        channels = None
        if connected:
            channels = connect_neighbours(
                [[self._global[rank] for rank in part] for part in parts],
                self._global[self.rank],
                indexed(torch.device(accelerator() or "cpu")),
                partial(self._device_group_of, limit=limit),
            )
        if len(mine) == self.size:
            self._channels = channels or self._channels
            return self
        own: Group | None = None
        for part in parts:
            if len(part) > 1:
                ranks = [self._global[rank] for rank in part]
                made = dist.new_group(ranks, timeout=limit, use_local_synchronization=False)
                devices = self._device_group_of(ranks, limit)
                if self.rank in part:
                    own = Group(made, self.meter, self._diagnose, devices)
        if own is None:
            own = Group(None, self.meter)
            own._global = [self._global[self.rank]]
        own._channels = channels
        return own

    def _device_group_of(self, ranks: list[int], limit: timedelta) -> dist.ProcessGroup | None:
        """Return a new group of some ranks like `device_group`; all ranks call it together."""
        if self.device_group is None:
            return None
        backend = dist.get_backend(self.device_group)
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, backend=backend)
        return made

    def alone(self) -> Group:
        """Return the group of this rank alone, with the same meter."""
        return Group(None, self.meter)

    def unmetered(self) -> Group:
        """Return the same ranks with a separate meter, for the traffic of measurements."""
        part = copy.copy(self)
        part.meter = Meter(self.meter.name)
        return part

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager: the meter counts nothing inside.

        Used for layers that use this group during a measurement.
        """
        # Earlier operations end before the meter changes, and operations inside before it returns.
        self.settle()
        meter = self.meter
        self.meter = Meter(meter.name)
        try:
            yield
        finally:
            self.settle()
            self.meter = meter

    def hosts(self) -> Hosts:
        """Return the partition of the ranks by host (`dure.collectives.hosts`).

        All ranks call it together. The partition is determined once for each process group.
        """
        # All groups over one process group share the answer, so all ranks ask or none does.
        if self._shared.hosts is None:
            numbers = self.all_gather_values(
                [number_of(name_of_this_host())], "finding out who shares a host"
            )
            self._shared.hosts = partition_by([number for (number,) in numbers])
        return self._shared.hosts

    def backend(self, device: torch.device) -> str:
        """Return the name of torch's backend for tensors of this device, such as "gloo".

        Empty if there is none.
        """
        if self.process_group is None:
            return ""
        name = backend_name(self.process_group, device)
        if name or self.device_group is None:
            return name
        return backend_name(self.device_group, device)

    def process_group_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the torch.distributed group that carries a tensor."""
        return self.process_group if tensor.is_cpu else self.device_group or self.process_group

    @overload
    def perform(self, operation: str, work: Callable[[], Value], tensor: Tensor) -> Value: ...
    @overload
    def perform(
        self, operation: str, work: Callable[[], Value], tensor: Tensor, async_op: bool
    ) -> Value | Handle[Value]: ...
    def perform(
        self, operation: str, work: Callable[[], Value], tensor: Tensor, async_op: bool = False
    ) -> Value | Handle[Value]:
        """Do `work` after all operations issued before: now, or in the background.

        operation: its name, for errors. tensor: a tensor of the transfer; on a device the work is
        queued on the stream that is current here. async_op: return a handle instead of the result.
        """
        # Read at the time of the call, because both may change before the other thread runs.
        step = self.step
        inference = torch.is_inference_mode_enabled()

        def here() -> Value:
            with torch.no_grad(), _During(self, operation, step):
                if not tensor.is_cpu:
                    self._connect(tensor.device)
                return work()

        if not async_op:
            self.settle()
            return here()
        # The work has to come after what the caller has queued on its stream.
        stream = current_stream(tensor.device)

        def there() -> Value:  # modes, devices and streams are a thread's own
            with (
                torch.inference_mode(inference),
                on_stream(stream),
            ):
                return here()

        return self._shared.line.put(there)

    def settle(self) -> None:
        """Wait until all operations that were issued on this process group have ended."""
        line = self._shared.line
        if line.thread is not None:
            line.settle()

    def _connect(self, device: torch.device) -> None:
        """Make all ranks take part in the first call on NCCL, as torch requires.

        Later calls may involve some of the ranks only.
        """
        if not self._shared.connected and self.backend(device) == "nccl":
            first = torch.zeros(1, device=device)
            dist.all_reduce(first, group=self.process_group_of(first))
            self._shared.connected = True

    def during(self, operation: str, step: str | None = None) -> _During:
        """Name the operation of the group, for errors; transfers that fail inside are diagnosed.

        step: step of the operation, if it differs from the group's.
        """
        return _During(self, operation, step)

    def _diagnosed(self, error: Exception, step: str) -> PeerLostError | None:
        return (
            self._diagnose(self.operation, step, self._shared.peer, error)
            if self._diagnose is not None
            else None
        )

    def holds(self, messages: int, nbytes: int) -> bool:
        """Return whether so many messages, of `nbytes` together, can be sent without a wait.

        The receiver's buffer holds them until the receiver asks for them.
        """
        return self.transport.holds(messages, nbytes)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to rank `to`; return when the tensor may be changed again."""
        self.transfer([(tensor, to)], [])

    def receive(self, into: Tensor, source: int) -> None:
        """Fill the contiguous tensor `into` with the tensor that rank `source` sends."""
        self.transfer([], [(into, source)])

    def exchange(self, tensor: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send to a rank while receiving from another; empty tensors are not sent."""
        self.transfer([(tensor, to)], [(into, source)])

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Do all of these sends and receives at once.

        They are pairs of a contiguous tensor and a rank, all on the same device. Between two ranks
        messages arrive in the order of sending. Empty tensors are not sent.
        """
        for _, rank in (*sends, *receives):
            check_rank(rank, self.size)
        # Both ends skip empty tensors, so neither waits for them.
        sends = [message for message in sends if message[0].numel()]
        receives = [message for message in receives if message[0].numel()]
        if not sends and not receives:
            return
        device = (sends or receives)[0][0].device
        if device.type == "cpu":
            self._transfer(sends, receives)
        elif self._device_transport.reaches(device):
            self._transfer_in_a_batch(sends, receives)
        else:
            self._transfer_by_way_of_memory(sends, receives)
        for tensor, _ in sends:
            self.meter.sent(tensor.nbytes)
        for into, _ in receives:
            self.meter.received(into.nbytes)

    def _transfer(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Do `transfer` for nonempty CPU tensors."""
        # From several sources: all receives are posted before the first wait.
        if len(receives) > 1 and len({source for _, source in receives}) > 1:
            self._wait(self._start(sends, receives))
            return
        # From a single source, receives complete in order and need no posting in advance.
        shared = self._shared
        posted = self._post(sends)
        for into, source in receives:
            shared.peer = self._global[source]
            self.transport.fetch(into, self._places[source])
        if posted:
            self._wait(posted)

    def _post(self, sends: Sequence[Message]) -> list[_Started]:
        """Begin the sends; return those that are still pending."""
        shared = self._shared
        posted: list[_Started] = []
        for tensor, to in sends:
            shared.peer = self._global[to]
            pending = self.transport.post(tensor, self._places[to])
            if pending is not None:  # else all of it has left already
                posted.append((to, pending))
        return posted

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[_Started]:
        """Begin all sends and receives; return those that are still pending."""
        posted = self._post(sends)
        expected: list[_Started] = []
        for into, source in receives:
            self._shared.peer = self._global[source]
            expected.append((source, self.transport.expect(into, self._places[source])))
        return expected + posted

    def _wait(self, started: Sequence[_Started]) -> None:
        # Sequential waits: the peer of the current wait is blamed for a failure (`_diagnosed`).
        for peer, pending in started:
            self._shared.peer = self._global[peer]
            pending.wait()

    def begin_transfer(
        self, operation: str, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[], None]:
        """Begin a `transfer` in the background; return a function that waits for its end.

        operation: its name, for errors. Between two ranks messages arrive in the order in which
        they were begun. Tensors of a device travel between the neighbours of a connected group
        (`split_into`) directly, and otherwise through the CPU's memory.
        """
        for _, rank in (*sends, *receives):
            check_rank(rank, self.size)
        sends = [(tensor, to) for tensor, to in sends if tensor.numel()]
        receives = [(into, source) for into, source in receives if into.numel()]
        if self._channels is None:
            return self._begin_on_the_host(operation, sends, receives)
        return self._begin_on_channels(self._channels, operation, sends, receives)

    def _begin_on_channels(
        self,
        channels: DeviceChannels,
        operation: str,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> Callable[[], None]:
        """Do `begin_transfer` over channels between devices, and for the rest on the host."""
        step = self.step
        started: list[_Started] = []
        sends_left: list[Message] = []
        receives_left: list[Message] = []
        arriving = 0
        with self.during(operation):
            for tensor, to in sends:
                work = channels.send(tensor, self._global[to])
                if work is None:
                    sends_left.append((tensor, to))
                else:
                    started.append((to, work))
                    self.meter.sent(tensor.nbytes)
            for into, source in receives:
                work = channels.receive(into, self._global[source])
                if work is None:
                    receives_left.append((into, source))
                else:
                    started.append((source, work))
                    arriving += into.nbytes
        end_on_the_host = self._begin_on_the_host(operation, sends_left, receives_left)

        def end() -> None:
            with self.during(operation, step):
                self._wait(started)
            self.meter.received(arriving)
            end_on_the_host()

        return end

    def _begin_on_the_host(
        self, operation: str, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[], None]:
        """Do `begin_transfer` from and to the CPU's memory."""
        sends = [(tensor if tensor.is_cpu else tensor.cpu(), to) for tensor, to in sends]
        arrivals = [(into if into.is_cpu else pinned_like(into), peer) for into, peer in receives]
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
            # `arrived` is `into` on the CPU, and for a device the CPU tensor of the transfer.
            for (into, _), (arrived, _) in zip(receives, arrivals, strict=True):
                if arrived is not into:
                    into.copy_(arrived)
                self.meter.received(into.nbytes)

        return end

    def _transfer_by_way_of_memory(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        """Transfer through the CPU's memory, for a backend without access to the device."""
        arrivals = [(pinned_like(into), source) for into, source in receives]
        self._transfer([(tensor.cpu(), to) for tensor, to in sends], arrivals)
        for (into, _), (arrived, _) in zip(receives, arrivals, strict=True):
            into.copy_(arrived, non_blocking=True)

    def _transfer_in_a_batch(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Transfer from the device's own memory, for a backend with access to the device."""
        places = self._places
        self._device_transport.transfer_there(
            [(tensor, places[to]) for tensor, to in sends],
            [(into, places[source]) for into, source in receives],
        )

    def all_gather_values(
        self, values: list[float], operation: str = "all-gather of measurements"
    ) -> list[list[float]]:
        """Return every rank's list of numbers, in order of rank; all lists have the same length.

        For bookkeeping such as metrics and counters: in float64, not counted by the meter.
        operation: its name, for errors.
        """
        if self.size == 1:
            return [values]
        self.settle()
        device = self._carried_on({CPU})
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        with self.during(operation):
            dist.all_gather(gathered, mine, group=self.process_group_of(mine))
        return [part.tolist() for part in gathered]

    @torch.no_grad()
    def broadcast_values(
        self, tensors: Sequence[Tensor], counted: bool = True, root: int = 0
    ) -> None:
        """Copy the root's tensors into every rank's tensors, in place, in a single message.

        Any dtype and stride. counted: whether the meter counts the broadcast, as N-1 messages of
        the root.
        """
        check_root(root, self.size)
        if self.size == 1 or not tensors:
            return
        self.settle()
        travels = self._carried_on({tensor.device for tensor in tensors})
        message = torch.cat([element_bytes(tensor).to(travels) for tensor in tensors])
        with self.during("broadcast of buffers"):
            dist.broadcast(message, self._global[root], group=self.process_group_of(message))
        if self.rank == root:
            for _ in range(self.size - 1 if counted else 0):
                self.meter.sent(message.nbytes)
            return
        if counted:
            self.meter.received(message.nbytes)
        start = 0
        for tensor in tensors:
            # A copy, since a dtype needs its bytes at a multiple of its size.
            arrived = (
                message[start : start + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
            )
            start += tensor.nbytes
            arrived = arrived.to(tensor.device)
            # An expanded tensor cannot be written, and never changes.
            if not torch.equal(arrived, tensor):
                tensor.copy_(arrived)

    def _carried_on(self, devices: set[torch.device]) -> torch.device:
        """Return the device for a joint message of such tensors: their own device if supported."""
        (first, *others) = devices
        if not others and self.backend(first):
            return first
        # Where NCCL is the only backend, it is the device of this rank.
        return CPU if self.backend(CPU) else indexed(torch.device(accelerator() or "cpu"))

    def broadcast_bytes(self, content: bytes | None) -> bytes:
        """Return rank 0's `content` on every rank. Bookkeeping, not counted by the meter."""
        if self.size == 1:
            return content or b""
        self.settle()
        # Only rank 0 knows the length: first the length is sent, then the bytes.
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
        """Return every rank's `content`, on rank 0 in order of rank; elsewhere an empty list.

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
