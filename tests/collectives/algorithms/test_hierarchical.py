"""The hierarchical all-reduce over given hosts: what stays within them, and what goes between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import measured, on_ranks
from torch import Tensor

from dure.collectives import Group, all_reduce
from dure.collectives.algorithms import hierarchical
from dure.contracts.world import RankContext

Sent = Counter[int]


class Watched(Group):
    """A group that notes how many bytes go to which rank."""

    to: Sent

    @classmethod
    def over(cls, group: Group) -> Watched:
        watched = cls(group.process_group, group.meter)
        watched.to = Counter()
        return watched

    def transfer(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        for tensor, to in sends:
            self.to[self.global_rank(to)] += tensor.nbytes
        super().transfer(sends, receives)


def reduce_over(hosts: list[list[int]], n: int, op: str = "sum") -> list[Any]:
    def program(context: RankContext) -> tuple[Tensor, int, int, dict[int, int]]:
        group = Watched.over(context.group)
        tensor = torch.arange(n) * (context.group.rank + 1)
        value, sent, messages = measured(
            group, lambda: all_reduce(tensor, group, "hierarchical", op, hosts=hosts)
        )
        return value, sent, messages, dict(group.to)

    return on_ranks(sum(map(len, hosts)), program)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(hosts_of=st.lists(st.integers(0, 2), min_size=2, max_size=6), n=st.integers(0, 50))
def test_any_partition_gives_the_sum_with_the_bytes_of_the_formula(
    hosts_of: list[int], n: int
) -> None:
    hosts = [[rank for rank, host in enumerate(hosts_of) if host == number] for number in range(3)]
    expected = torch.arange(n) * sum(range(1, len(hosts_of) + 1))
    for rank, (value, sent, messages, _) in enumerate(reduce_over(hosts, n)):
        assert torch.equal(value, expected)
        assert sent == 8 * hierarchical.elements_sent(n, len(hosts_of), rank, hosts)
        assert messages == hierarchical.messages_sent(n, len(hosts_of), rank, hosts)


def test_between_two_hosts_every_byte_goes_once_in_each_direction() -> None:
    for hosts in ([[0, 1], [2, 3]], [[0, 3, 4], [1, 2]], [[2], [0, 1, 3]]):
        n = 41
        crossing: Counter[bool] = Counter()
        for rank, (_, _, _, to) in enumerate(reduce_over(hosts, n)):
            first = rank in hosts[0]
            crossing[first] += sum(
                nbytes for peer, nbytes in to.items() if (peer in hosts[0]) != first
            )
        assert crossing == {True: 8 * n, False: 8 * n}


def test_the_product_is_not_finished_twice_nor_the_average() -> None:
    def program(context: RankContext) -> Tensor:
        return all_reduce(
            torch.full((5,), 8.0), context.group, "hierarchical", "avg", hosts=[[0, 1], [2]]
        )

    assert on_ranks(3, program)[1].tolist() == [8.0] * 5


def test_transfers_behind_each_other() -> None:
    assert hierarchical.rounds(8) == 2
    assert hierarchical.rounds(8, [[0, 1, 2, 3], [4, 5, 6, 7]]) == 4
    assert hierarchical.rounds(3, [[0], [1], [2]]) == 4
