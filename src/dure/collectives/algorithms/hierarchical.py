"""Hierarchical all-reduce: within each host, then across hosts, then within again.

The tensor of n elements is cut into K lanes, where K is the number of ranks on the smallest host.
(1) Within a host every rank sends lane k directly to the host's k-th rank, which adds. (2) The k-th
ranks of all H hosts reduce lane k around a ring (`ring.all_reduce`). (3) Within a host the k-th
rank sends lane k to all others.

Cost with L ranks on this host, at most: n elements in (1); 2(H-1)/H of a lane in (2); L-1 lanes in
(3). Only (2) crosses the network: a host sends 2(H-1)/H·n elements, with two hosts every element
once in each direction. A ring through all N ranks would send as much but take 2(N-1) steps instead
of 2(H-1) + 2. Hosts may have any number of ranks; with a single rank on the smallest host, K = 1
and its (1) and (3) are a reduce and a broadcast. `elements_sent` is exact. Scratch: L-1 lanes.
Every lane is summed in a fixed order and then copied: all ranks have the same bits.

Source: the hierarchical all-reduces of Horovod and NCCL; Thakur et al. 2005 describe the idea for
clusters of SMPs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dure.collectives.algorithms import one_shot, ring
from dure.collectives.algorithms.algorithm import AllReduce, even_path
from dure.collectives.arguments import lengths_of
from dure.collectives.group import Group
from dure.collectives.hosts import Hosts, checked
from dure.collectives.operation import SUM, Reduction


def all_reduce(
    flat: Tensor,
    group: Group,
    reduction: Reduction = SUM,
    hosts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Reduce over all ranks, in place on every rank.

    flat: contiguous, of one dimension. hosts: ranks of each host; determined if not given.
    """
    partition = group.hosts() if hosts is None else checked(hosts, group.size)
    neighbours = next(ranks for ranks in partition if group.rank in ranks)
    # As many lanes as ranks on the smallest host, so that every host has a rank for each lane.
    lanes = ring.chunks_of(flat, min(map(len, partition)))
    local = group.among(neighbours)
    # An average is divided once, after the sum over the hosts.
    one_shot.reduce_scatter(lanes, local, reduction.partial())
    # On a larger host the last ranks have no lane, and wait for the result.
    if local.rank < len(lanes):
        across = group.among([ranks[local.rank] for ranks in partition])
        ring.all_reduce(lanes[local.rank], across, reduction)
    one_shot.all_gather(lanes, local)


def _position(
    size: int, rank: int, hosts: Sequence[Sequence[int]] | None
) -> tuple[Hosts, int, int]:
    """Return the partition, this rank's host in the partition, and its position on the host."""
    partition = (tuple(range(size)),) if hosts is None else checked(hosts, size)
    host = next(index for index, ranks in enumerate(partition) if rank in ranks)
    return partition, host, partition[host].index(rank)


def sends_within(
    n: int, size: int, rank: int, hosts: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Return the lengths of the messages that `rank` sends to other ranks of its host.

    hosts: None is a single host.
    """
    partition, host, place = _position(size, rank, hosts)
    lanes = lengths_of(n, min(map(len, partition)))
    lengths = [length for index, length in enumerate(lanes) if index != place]
    if place < len(lanes):
        lengths += [lanes[place]] * (len(partition[host]) - 1)
    return [length for length in lengths if length]


def lane_of(
    n: int, size: int, rank: int, hosts: Sequence[Sequence[int]] | None = None
) -> tuple[int, int, int]:
    """Return the lane that `rank` reduces across hosts.

    The elements of its lane, or 0; the number of hosts; the index of its own host.
    """
    partition, host, place = _position(size, rank, hosts)
    lanes = lengths_of(n, min(map(len, partition)))
    return (lanes[place] if place < len(lanes) else 0), len(partition), host


def elements_sent(
    n: int, size: int, rank: int, hosts: Sequence[Sequence[int]] | None = None
) -> int:
    """Return the elements that `rank` sends: within its host, and in the ring of its lane."""
    return sum(sends_within(n, size, rank, hosts)) + ring.elements_sent(
        *lane_of(n, size, rank, hosts)
    )


def messages_sent(
    n: int, size: int, rank: int, hosts: Sequence[Sequence[int]] | None = None
) -> int:
    """Return the messages that `rank` sends: within its host, and in the ring of its lane."""
    return len(sends_within(n, size, rank, hosts)) + ring.messages_sent(
        *lane_of(n, size, rank, hosts)
    )


def rounds(size: int, hosts: Sequence[Sequence[int]] | None = None) -> int:
    """Return the sequential transfers: 2 within hosts with several ranks, 2(H-1) across hosts."""
    partition = _position(size, 0, hosts)[0]
    return 2 * (len(partition) < size) + 2 * (len(partition) - 1)


ALL_REDUCE = AllReduce(
    name="hierarchical",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=even_path,  # on one host it is one_shot
    over_hosts=True,
)
