"""Transport over the shared-memory backend: messages, the fastest sum, and begun calls.

None of them passes through torch's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.shared_memory.begun_calls import BegunCalls
from dure.collectives.shared_memory.calls import check_tensor, operation_of
from dure.collectives.shared_memory.host import Host
from dure.collectives.shared_memory.mailbox import HEADER_BYTES, Mailbox
from dure.collectives.shared_memory.torch_collectives import TorchCollectives
from dure.collectives.shared_memory.two_hosts.inter_host import InterHostCollectives
from dure.collectives.shared_memory.work import CallQueue
from dure.collectives.transport import BegunCall, Pending, Transport

_DENSE = torch.strided


class SharedMemoryTransport(Transport):
    """Transport of a rank. sum: the fast path to a sum in place, from `Host.direct`.

    here: the ranks of this host, by whose positions the mailbox addresses them; across: transfers
    to ranks of other hosts.
    """

    begins_reductions = True

    def __init__(
        self,
        host: Host,
        here: Sequence[int],
        mailbox: Mailbox,
        across: InterHostCollectives | None,
        begun: BegunCalls,
        moves: TorchCollectives,
        line: CallQueue,
        sum: Callable[[Tensor], None],
    ) -> None:
        self._place = {rank: place for place, rank in enumerate(here)}
        self._mailbox = mailbox
        self._across = across
        self._begun = begun
        self._moves = moves
        self._line = line
        # `holds` applies to this host's channels only: the capacity of a network is unknown.
        self._held = 0 if across is not None else host.channel_bytes
        self.sum = sum  # type: ignore[assignment, method-assign]
        self.apart = begun.apart
        self.split_phase = begun.split_phase

    # Messages.

    def post(self, tensor: Tensor, to: int) -> Pending | None:
        tensor = _carried(tensor)
        place = self._place.get(to)
        if place is None:
            return self._far().send(tensor, to, 0)
        return self._mailbox.post(tensor, place, 0)

    def expect(self, into: Tensor, source: int) -> Pending:
        into = _carried(into)
        place = self._place.get(source)
        if place is None:
            return self._far().receive(into, source, 0)
        return self._mailbox.receive(into, place, 0)

    def fetch(self, into: Tensor, source: int) -> None:
        into = _carried(into)
        place = self._place.get(source)
        if place is None:
            self._far().receive(into, source, 0).wait()
        else:
            self._mailbox.fetch(into, place, 0)

    def _far(self) -> InterHostCollectives:
        """Return the connection to ranks of other hosts."""
        assert self._across is not None, "all ranks are here"
        return self._across

    def holds(self, messages: int, nbytes: int) -> bool:
        return nbytes + messages * HEADER_BYTES <= self._held

    # Reductions.

    def averages(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def prepare_all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType
    ) -> Callable[[], Callable[[], float]]:
        return self._begun.prepare_all_reduce(tensor, operation_of(op))

    def prepare_reduce_scatter(
        self, output: Tensor, source: Tensor, op: dist.ReduceOp.RedOpType
    ) -> Callable[[Sequence[Tensor]], BegunCall]:
        return self._begun.prepare_reduce_scatter(output, source, operation_of(op))

    def begin_all_gather(self, output: Tensor, source: Tensor) -> Callable[[], float]:
        return self._begun.begin_all_gather(output, source)

    def meet(self) -> None:
        self._line.now(self._moves.barrier)


def _carried(tensor: Tensor) -> Tensor:
    """Return the tensor as it is sent: complex numbers as two real numbers.

    Raises CallError for a tensor that cannot be sent.
    """
    if tensor.is_complex() or tensor.is_neg() or not tensor.is_cpu or tensor.layout != _DENSE:
        check_tensor(tensor)
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor
