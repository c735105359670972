"""Who shares a host."""

from __future__ import annotations

import pytest
from on_ranks import measured, on_ranks

from dure.collectives.hosts import checked, name_of_this_host, number_of, partition_by
from dure.contracts.world import RankContext


def test_ranks_are_grouped_by_their_hosts_number() -> None:
    numbers = [number_of(name) for name in ("b", "a", "b", "c")]
    assert partition_by(numbers) == ((0, 2), (1,), (3,))
    assert number_of("a") == number_of("a") < 2**48
    assert name_of_this_host() == name_of_this_host()


def test_a_partition_has_every_rank_once_and_one_order() -> None:
    assert checked([[3, 1], [], [2, 0]], 4) == ((0, 2), (1, 3))
    for wrong in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], []):
        with pytest.raises(ValueError, match="each of the ranks 0 to 2 needs exactly one"):
            checked(wrong, 3)


def test_processes_of_one_machine_share_their_host_and_finding_out_counts_for_nothing() -> None:
    def program(context: RankContext) -> tuple[object, int, bool]:
        found = measured(context.group, context.group.hosts)
        return found.value, found.sent, context.group.hosts() is found.value

    assert on_ranks(3, program) == [(((0, 1, 2),), 0, True)] * 3
