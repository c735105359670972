"""Who takes part when, and for whom others wait."""

from __future__ import annotations

import math

from dure.parameter_server.members import WorkerMembers


def test_a_worker_takes_part_until_its_end_and_is_waited_for_until_then() -> None:
    members = WorkerMembers.of([0, 1, 2]).without(1, 5)
    assert members.at(4) == (0, 1, 2)
    assert members.at(5) == (0, 2)
    assert (members.end(1), members.end(0)) == (5, None)
    assert members.floor([(0, 9), (1, 4), (2, 7)]) == 4
    assert members.floor([(0, 9), (1, 5), (2, 7)]) == 7


def test_ends_of_several_come_in_any_order() -> None:
    late_first = WorkerMembers.of([0, 1, 2]).without(1, 8).without(2, 3)
    assert [late_first.at(clock) for clock in (0, 3, 8)] == [(0, 1, 2), (0, 1), (0,)]
    assert (late_first.end(1), late_first.end(2)) == (8, 3)
    assert late_first.workers == (0, 1, 2)


def test_where_nobody_is_left_nobody_is_waited_for() -> None:
    assert WorkerMembers.of([0]).without(0, 2).floor([(0, 2)]) == math.inf


def test_one_that_never_took_part_is_known_all_the_same() -> None:
    members = WorkerMembers.of([0, 1, 2]).without(1, 0).without(0, 0)
    assert members.at(0) == (2,)
    assert members.workers == (0, 1, 2)
    assert (members.end(0), members.end(1), members.end(2)) == (0, 0, None)
