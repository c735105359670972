"""The scheduler: every part once, whoever asks, and whoever dies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.parameter_server.members import WorkerMembers
from dure.parameter_server.scheduler import BatchPart, Scheduler


@given(
    workers=st.integers(1, 5),
    batches=st.integers(0, 60),
    turns=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40),
)
def test_each_part_is_done_once_whoever_asks_and_whoever_dies(
    workers: int, batches: int, turns: list[tuple[int, bool]]
) -> None:
    scheduler = Scheduler(WorkerMembers.of(range(workers)), bounded=False)
    scheduler.until = batches
    alive = set(range(workers))
    done: list[BatchPart] = []
    for who, dies in [*turns, *[(who, False) for who in range(workers)] * 400]:
        who %= workers
        if who not in alive:
            # It was stopped, and wakes.
            assert not scheduler.deal(who)
            continue
        works = scheduler.deal(who)
        if dies and len(alive) > 1:
            alive.remove(who)
            scheduler.gone(who)
            continue
        for work in works:
            scheduler.done(who, work)
        done += works
    assert scheduler.idle
    expected = [BatchPart(b, p, workers) for b in range(batches) for p in range(workers)]
    assert sorted(done, key=lambda w: (w.batch, w.part)) == expected


def test_many_parts_are_dealt_at_a_time_and_single_ones_near_the_end() -> None:
    scheduler = Scheduler(WorkerMembers.of((0, 1)), bounded=False)
    scheduler.until = 1000
    dealt = []
    while works := scheduler.deal(0):
        dealt.append(len(works))
        for work in works:
            scheduler.done(0, work)
    assert sum(dealt) == 2000
    assert dealt == sorted(dealt, reverse=True)
    assert dealt[0] > 10
    # The other one, at work on what it was dealt last, is waited for no longer than for one part.
    assert dealt[-8:] == [1] * 8


def test_batches_keep_their_parts_when_a_worker_dies_before_its_first_push() -> None:
    scheduler = Scheduler(WorkerMembers.of([0, 1]), bounded=False)
    scheduler.until = 2
    had = scheduler.next(1, 0)
    scheduler.members = scheduler.members.without(1, 0)
    scheduler.gone(1)
    parts = []
    while (work := scheduler.next(0, 0)) is not None:
        parts.append(work)
    assert had in parts
    assert sorted((work.batch, work.part, work.parts) for work in parts) == [
        (batch, part, 2) for batch in range(2) for part in range(2)
    ]
