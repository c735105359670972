"""Channels between the devices of neighbouring ranks, for messages in the background.

A backend such as NCCL executes the messages of a group in the order of their issue, and a send
waits for its receiver. In a common group two ranks that both send first would therefore wait for
each other. A channel is a group of two ranks that transports the messages of one direction alone:
it can only wait for the receiver's earlier receives, which come in the order of the sends.

A ring of N ranks has 2 N channels, each with a communicator of the backend at both ends.

Source: NVIDIA, "NCCL user guide", point-to-point communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.transport import Pending, begun_work

Edge = tuple[int, int]
"""Sender and receiver, as ranks of the whole job."""


class DeviceChannels:
    """Channels that begin or end at this rank.

    here: this rank in the whole job. groups: group of each channel.
    """

    def __init__(self, here: int, groups: Mapping[Edge, dist.ProcessGroup]) -> None:
        self._here = here
        self._groups = groups

    def send(self, tensor: Tensor, to: int) -> Pending | None:
        """Begin to send a tensor to a rank of the job; None without a channel for it."""
        group = self._groups.get((self._here, to))
        if tensor.is_cpu or group is None:
            return None
        return begun_work(dist.isend(tensor, to, group=group))

    def receive(self, into: Tensor, source: int) -> Pending | None:
        """Begin to receive from a rank of the job; None without a channel for it."""
        group = self._groups.get((source, self._here))
        if into.is_cpu or group is None:
            return None
        return begun_work(dist.irecv(into, source, group=group))


def connect_neighbours(
    rings: Sequence[Sequence[int]],
    here: int,
    device: torch.device,
    make: Callable[[list[int]], dist.ProcessGroup | None],
) -> DeviceChannels | None:
    """Return the channels of this rank between the neighbours of its ring, each way.

    All ranks call it together with the same rings. None without a backend for devices.

    Args:
        rings: ranks of the job, each in one ring.
        here: this rank in the job.
        device: device of this rank.
        make: makes a group of some ranks for tensors of devices, on all ranks together; None
            without a backend for them.
    """
    groups: dict[Edge, dist.ProcessGroup] = {}
    for ring in rings:
        pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
        for edge in sorted({(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a != b}):
            group = make(list(edge))
            if group is None:
                return None
            if here in edge:
                groups[edge] = group
                # The first message connects the pair, and would block either rank later.
                first = torch.zeros(1, device=device)
                if here == edge[0]:
                    dist.send(first, edge[1], group=group)
                else:
                    dist.recv(first, edge[0], group=group)
    return DeviceChannels(here, groups) if groups else None
