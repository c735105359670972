"""Schedules as data: all can run, messages keep their order, what is written is read again."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.pipeline.builders import SCHEDULES, forward_only, make, round_robin
from dure.parallel.pipeline.schedule import COMPUTING, KINDS, Action, Schedule, with_transfers
from dure.parallel.pipeline.validate import check
from dure.parallel.pipeline.zero_bubble_v import v_shaped

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 16)
CHUNKS = st.integers(1, 4)


def made(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Any schedule, with numbers that it takes."""
    chunks = {"interleaved": chunks, "zero-bubble-v": 2}.get(name, 1)
    return make(name, ranks, 1 if name == "naive" else microbatches, chunks)


SCHEDULE = st.builds(made, st.sampled_from(list(SCHEDULES)), RANKS, MICROBATCHES, CHUNKS)


@given(SCHEDULE)
def test_every_schedule_is_right_and_is_read_as_it_was_written(schedule):
    check(schedule)
    assert Schedule.parse(schedule.text()) == schedule
    stages = chain.from_iterable(map(schedule.stages_of, range(schedule.ranks)))
    assert sorted(stages) == list(range(schedule.stages))


@given(SCHEDULE)
def test_every_boundary_between_ranks_is_crossed_once_each_way_by_every_microbatch(schedule):
    boundaries = sum(a != b for a, b in pairwise(schedule.home))
    transfers = sum(not action.computes for action in chain.from_iterable(schedule.actions))
    assert transfers == 2 * 2 * boundaries * schedule.microbatches


@given(st.sampled_from([round_robin, lambda p, v: v_shaped(p)]), RANKS, MICROBATCHES, CHUNKS)
def test_forwards_alone_are_a_schedule_for_any_home(homes, ranks, microbatches, chunks):
    schedule = forward_only(homes(ranks, chunks), microbatches)
    check(schedule, require_backward=False)
    assert {action.kind for action in chain.from_iterable(schedule.computing)} == {"forward"}


@given(st.permutations(list(range(3)) * 2), st.integers(1, 5))
def test_homes_may_be_in_any_order(home, microbatches):
    check(forward_only(home, microbatches), require_backward=False)


@given(SCHEDULE)
def test_a_message_leaves_right_after_it_was_made(schedule):
    for actions in schedule.actions:
        for before, action in pairwise(actions):
            if action.kind in ("send_output", "send_gradient"):
                assert before[1:] == action[1:]
                assert before.computes


def test_messages_are_received_in_the_order_of_sending_though_needed_in_another():
    sends = [Action.parse(text) for text in ("F0.0", "F0.1", "F0.2")]
    needs = [Action.parse(text) for text in ("F1.1", "F1.0", "F1.2")]
    schedule = with_transfers("turned", (0, 1), 3, [sends, needs])
    assert " ".join(map(str, schedule.actions[1])) == "RI1.0 RI1.1 F1.1 F1.0 RI1.2 F1.2"
    check(schedule, require_backward=False)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 4), st.randoms())
def test_any_order_that_can_happen_becomes_a_schedule_by_its_transfers(home, microbatches, random):
    home = [sorted(set(home)).index(rank) for rank in home]  # every rank has a stage
    chains = []
    for number in range(microbatches):
        stages = range(len(home))
        down = [Action("forward", stage, number) for stage in stages]
        chains.append(down + [Action("backward", stage, number) for stage in reversed(stages)])
    computing = [[] for _ in set(home)]
    while chains:
        chain = random.choice(chains)
        action = chain.pop(0)
        computing[home[action.stage]].append(action)
        chains = [chain for chain in chains if chain]
    schedule = with_transfers("any", home, microbatches, computing)
    check(schedule)
    assert schedule.computing == tuple(map(tuple, computing))


def test_small_schedules_are_those_of_the_papers():
    def computing(*numbers, rank):
        return " ".join(map(str, make(*numbers).computing[rank]))

    assert computing("gpipe", 2, 2, rank=0) == "F0.0 F0.1 B0.1 B0.0"
    assert computing("1f1b", 3, 4, rank=0) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert computing("1f1b", 3, 4, rank=2) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"
    assert computing("1f1b", 3, 1, rank=0) == "F0.0 B0.0"
    assert computing("interleaved", 2, 2, 2, rank=1) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"
    assert computing("interleaved", 2, 1, 2, rank=1) == "F1.0 F3.0 B3.0 B1.0"
    assert computing("zero-bubble", 2, 3, rank=0) == "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2"
    assert computing("zero-bubble", 2, 3, rank=1) == "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2"
    assert computing("zero-bubble-v", 1, 1, 2, rank=0) == "F0.0 F1.0 I1.0 I0.0 W0.0 W1.0"
    assert make("naive", 2, 1).text() == (
        "schedule: naive\nhome: 0 1\nmicrobatches: 1\nrank 0: F0.0 SO0.0 RG0.0 B0.0\nrank 1: RI1.0 "
        "F1.0 B1.0 SG1.0\n"
    )


@given(
    st.builds(
        Action, st.sampled_from(list(KINDS.values())), st.integers(0, 40), st.integers(0, 400)
    )
)
def test_an_action_is_read_as_it_was_written(action):
    assert Action.parse(str(action)) == action
    assert f"{action}" == str(action)
    assert action.computes == (action.kind in COMPUTING)
    if not action.computes and action.counterpart.stage >= 0:
        assert action.counterpart.counterpart == action


@pytest.mark.parametrize("text", ["", "F", "F0", "X0.1", "F0.1.2", "f0.1", "F-1.0", "F0.1 "])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


def test_what_computes_has_no_counterpart():
    with pytest.raises(ValueError, match=r"F0\.0 is not a transfer"):
        _ = Action("forward", 0, 0).counterpart


def test_a_schedule_can_be_written_by_hand_without_its_transfers():
    written = """
    schedule: mine   # with a remark
    home: 0 1
    microbatches: 1

    rank 1: F1.0 B1.0
    rank 0: F0.0 B0.0
    """
    read = Schedule.parse(written)
    assert read.actions == read.computing
    assert (
        with_transfers(read.name, read.home, 1, read.computing).actions
        == make("1f1b", 2, 1).actions
    )


@pytest.mark.parametrize(
    ("changed", "by", "said"),
    [
        ("home: 0 1", "", "no line 'home:'"),
        ("home: 0 1", "home: 0 one", "'one' is not a number"),
        ("microbatches: 1", "microbatches: few", "'few' is not a number"),
        ("rank 0:", "rank 2:", "no line 'rank 0:'"),
        ("rank 1:", "rank 0:", "line 5: 'rank 0' occurs twice"),
        ("rank 1:", "and then", "line 5: 'and then"),
        ("rank 1:", "device 1:", "line 5: 'device 1"),
        ("F1.0", "F1", "'F1' is not an action"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(changed, by, said):
    with pytest.raises(ValueError, match=said):
        Schedule.parse(make("naive", 2, 1).text().replace(changed, by))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1B", 2, 2), "did you mean '1f1b'"),
        (("zero_bubble", 2, 2), "did you mean 'zero-bubble'"),
        (("nothing", 2, 2), "there are: naive, gpipe"),
        (("gpipe", 0, 2), "ranks is 0"),
        (("gpipe", 2, 0), "microbatches is 0"),
        (("interleaved", 2, 2, 0), "stages_per_rank is 0"),
        (("gpipe", 2, 2, 2), "gpipe has one stage a rank, not 2"),
        (("naive", 2, 2), "one micro-batch, not 2"),
        (("zero-bubble-v", 2, 2), "two stages a rank, not 1"),
    ],
)
def test_names_and_numbers_without_a_schedule_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        make(*arguments)
