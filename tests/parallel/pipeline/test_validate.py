"""A schedule that cannot run is refused, and the first thing wrong with it is named."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.parallel.pipeline.builders import forward_only, make
from dure.parallel.pipeline.schedule import SENDS, Action, Schedule
from dure.parallel.pipeline.validate import ScheduleError, check

SCHEDULE = st.builds(
    make,
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.integers(2, 5),
    st.integers(2, 6),
) | st.builds(
    make,
    st.sampled_from(["interleaved", "zero-bubble-v"]),
    st.integers(2, 4),
    st.integers(2, 6),
    st.just(2),
)


def written(*lists: str, home: tuple[int, ...] | None = None, microbatches: int = 1) -> Schedule:
    actions = tuple(tuple(map(Action.parse, text.split())) for text in lists)
    return Schedule(
        "written", tuple(range(len(lists))) if home is None else home, microbatches, actions
    )


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return replace(schedule, actions=tuple(lists))


def refused(schedule: Schedule, require_backward: bool = True) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        check(schedule, require_backward)
    error = caught.value
    assert "\n" not in str(error)
    if error.place is not None:
        assert schedule.actions[error.rank][error.place] == error.action
        assert f"{error.action} (rank {error.rank}, place {error.place})" in str(error)
    return error


@st.composite
def chosen(draw, *kinds):
    """A schedule, with the rank and the place of one of its actions of these kinds."""
    schedule = draw(SCHEDULE)
    places = []
    fitting = []
    for rank, actions in enumerate(schedule.actions):
        for place, action in enumerate(actions):
            places.append((rank, place))
            if action.kind in kinds:
                fitting.append((rank, place))
    return schedule, *draw(st.sampled_from(fitting or places))


@given(chosen("receive_input", "receive_gradient"))
def test_a_dropped_receive_is_named_by_what_needed_it(case):
    schedule, rank, place = case
    actions = list(schedule.actions[rank])
    dropped = actions.pop(place)
    error = refused(changed(schedule, rank, actions))
    assert error.rank == rank
    assert error.action[1:] == dropped[1:]
    assert error.action.kind in (
        ("forward",) if dropped.kind == "receive_input" else ("backward", "input_gradient")
    )
    assert f"needs {dropped}, which is missing" in str(error)


@given(chosen("send_output", "send_gradient"))
def test_a_dropped_send_is_named_by_what_waits_for_it(case):
    schedule, rank, place = case
    actions = list(schedule.actions[rank])
    dropped = actions.pop(place)
    error = refused(changed(schedule, rank, actions))
    assert error.action == dropped.counterpart
    assert error.rank == schedule.home[dropped.counterpart.stage]
    assert f"{dropped} is missing on rank {rank}" in str(error)


@given(
    chosen(
        "forward", "backward", "input_gradient", "weight_gradient", "send_output", "receive_input"
    )
)
def test_an_action_that_is_there_twice_is_named(case):
    schedule, rank, place = case
    actions = [*schedule.actions[rank], schedule.actions[rank][place]]
    error = refused(changed(schedule, rank, actions))
    assert (error.rank, error.place) == (rank, len(actions) - 1)
    assert f"occurs twice, first at place {place}" in str(error)


@given(chosen("forward", "backward", "input_gradient", "weight_gradient"))
def test_a_computation_that_is_left_out_is_named_or_what_needed_it(case):
    schedule, rank, place = case
    actions = list(schedule.actions[rank])
    dropped = actions.pop(place)
    error = refused(changed(schedule, rank, actions))
    assert str(dropped) in str(error)
    assert error.rank == rank


@given(chosen("forward", "weight_gradient", "send_output"), st.data())
def test_an_action_on_a_foreign_rank_is_named(case, data):
    schedule, rank, place = case
    other = data.draw(st.sampled_from([other for other in range(schedule.ranks) if other != rank]))
    at = data.draw(st.integers(0, len(schedule.actions[other])))
    left = list(schedule.actions[rank])
    more = list(schedule.actions[other])
    more.insert(at, left.pop(place))
    error = refused(changed(changed(schedule, rank, left), other, more))
    assert (error.rank, error.place) == (other, at)
    assert f"wrong rank: stage {error.action.stage} is on rank {rank}" in str(error)


def sends_to_one_rank(schedule, actions):
    """Places of two sends to the same rank, the later one first."""
    sends = [(place, action) for place, action in enumerate(actions) if action.kind in SENDS]
    pairs = itertools.combinations(sends, 2)
    return [(j, i) for (i, one), (j, two) in pairs if _to(schedule, one) == _to(schedule, two)]


@settings(max_examples=50)
@given(SCHEDULE, st.data())
def test_two_sends_in_each_others_places_are_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    actions = list(schedule.actions[rank])
    later, earlier = data.draw(st.sampled_from(sends_to_one_rank(schedule, actions)))
    actions[later], actions[earlier] = actions[earlier], actions[later]
    error = refused(changed(schedule, rank, actions))
    assert (error.rank, error.place) == (rank, earlier), "it is sent before it is made"
    assert "which comes only at place" in str(error)


@settings(max_examples=50)
@given(SCHEDULE, st.data())
def test_messages_that_are_sent_in_another_order_than_received_are_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    actions = list(schedule.actions[rank])
    later, earlier = data.draw(st.sampled_from(sends_to_one_rank(schedule, actions)))
    late = actions[earlier]
    actions.insert(later + 1, late)
    del actions[earlier]
    error = refused(changed(schedule, rank, actions))
    assert error.action == late.counterpart
    assert "crossed order" in str(error)


def _to(schedule: Schedule, send: Action) -> int:
    return schedule.home[send.counterpart.stage]


@given(SCHEDULE, st.data())
def test_a_stage_that_computes_nothing_is_dead(schedule, data):
    stage = data.draw(st.integers(0, schedule.stages - 1))
    rank = schedule.home[stage]
    kept = [
        action
        for action in schedule.actions[rank]
        if not (action.computes and action.stage == stage)
    ]
    error = refused(changed(schedule, rank, kept))
    assert f"stage {stage} is unused: rank {rank}" in str(error)
    assert error.action == Action("forward", stage, 0)


def test_two_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for():
    schedule = written(
        "F0.0 SO0.0 RG0.0 B0.0 F0.1 SO0.1 RG0.1 B0.1",
        "RI1.0 F1.0 RI1.1 F1.1 B1.0 SG1.0 B1.1 SG1.1",
        microbatches=2,
    )
    error = refused(schedule)
    assert (error.rank, error.place, str(error.action)) == (0, 2, "RG0.0")
    assert (
        "waits for SG1.0, which comes after RI1.1; RI1.1 waits for SO0.1, which comes after RG0.0"
        in str(error)
    )


@given(
    st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    st.integers(2, 6),
    st.integers(1, 6),
    st.data(),
)
def test_a_rank_that_waits_for_a_gradient_before_it_sends_an_output_deadlocks(
    name, ranks, microbatches, data
):
    schedule = make(name, ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 2))
    actions = list(schedule.actions[rank])
    place = next(place for place, action in enumerate(actions) if action.kind == "receive_gradient")
    actions.insert(0, actions.pop(place))
    error = refused(changed(schedule, rank, actions))
    assert (error.rank, error.place, error.action) == (rank, 0, actions[0])
    assert (
        f"(deadlock): it waits for {actions[0].counterpart}, which comes after RI{rank + 1}.0"
        in str(error)
    )


def test_a_deadlock_is_named_by_its_circle_and_not_by_a_rank_that_waits_outside():
    schedule = written(
        "F0.0 SO0.0 RG0.0 B0.0 F0.1 SO0.1 RG0.1 B0.1",
        "RI1.0 F1.0 SO1.0 RG1.0 B1.0 SG1.0 RI1.1 F1.1 SO1.1 RG1.1 B1.1 SG1.1",
        "RI2.0 F2.0 RI2.1 F2.1 B2.0 SG2.0 B2.1 SG2.1",
        microbatches=2,
    )
    error = refused(schedule)
    assert (error.rank, str(error.action)) == (1, "RG1.0")


@pytest.mark.parametrize(
    ("schedule", "said", "at"),
    [
        (written("", home=()), "0 stages", (None, None)),
        (written("F0.0 B0.0", microbatches=0), "0 micro-batches", (None, None)),
        (written("F0.0 B0.0", home=(0, 1)), "stage 1 is on rank", (1, None)),
        (written("F0.0 B0.0", "", home=(0,)), "rank 1 has no stage", (1, None)),
        (written("F0.0 B0.0 F1.0"), "a stage that does not exist", (0, 2)),
        (written("F0.0 B0.0 F0.1"), "a micro-batch that does not exist", (0, 2)),
        (written("F0.0 B0.0 SO0.0"), "stage 0 is the last one", (0, 2)),
        (written("RI0.0 F0.0 B0.0"), "stage 0 is the first one", (0, 0)),
        (
            written("F0.0 SO0.0 F1.0 B1.0 B0.0", home=(0, 0)),
            "stages 0 and 1 are both on rank 0",
            (0, 1),
        ),
        (written("B0.0 F0.0"), "needs F0.0, which comes only at place 1", (0, 0)),
        (written("F0.0 I0.0"), "W0.0 is missing", (0, None)),
        (written("F0.0 W0.0 I0.0"), "needs I0.0, which comes only", (0, 1)),
        (written("F0.0 W0.0"), "needs I0.0, which is missing", (0, 1)),
        (written("F0.0 B0.0 I0.0 W0.0"), "second backward after B0.0", (0, 2)),
        (written("F0.0 I0.0 W0.0 B0.0"), "second backward after I0.0", (0, 3)),
        (written("F0.0 F1.0 B0.0 B1.0", home=(0, 0)), "B0.0.*needs B1.0, which comes only", (0, 2)),
        (written("F1.0 F0.0 B1.0 B0.0", home=(0, 0)), "F1.0.*needs F0.0, which comes only", (0, 0)),
        (written("F0.0 B0.0", microbatches=2), "F0.1 is missing", (0, None)),
        (written("F0.0"), "B0.0 is missing", (0, None)),
        (written("F0.0 SO0.0 SG0.0", "RI1.0 F1.0"), "nothing to transfer", (0, 2)),
        (
            written("F0.0 SO0.0 RG0.0 B0.0", "RI1.0 F1.0 SG1.0 B1.0"),
            "needs B1.0, which comes only",
            (1, 2),
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(schedule, said, at):
    with pytest.raises(ScheduleError, match=said):
        check(schedule)
    error = refused(schedule)
    assert (error.rank, error.place) == at


def test_a_message_that_nobody_receives_is_refused():
    schedule = written("F0.0 SO0.0", "F1.0", home=(0, 1))
    error = refused(schedule, require_backward=False)
    assert "needs RI1.0" in str(error)
    schedule = written("F0.0 SO0.0 RG0.0 B0.0", "RI1.0 F1.0 B1.0 SG1.0")
    without = changed(
        schedule, 0, [action for action in schedule.actions[0] if action.stage == 0][:2]
    )
    error = refused(without, require_backward=False)
    assert str(error.action) == "SG1.0"
    assert "never received: RG0.0 is missing on rank 0" in str(error)


def test_forwards_alone_are_refused_where_backwards_are_required():
    schedule = forward_only((0, 1), 2)
    check(schedule, require_backward=False)
    assert str(refused(schedule).action) == "B0.0"


def test_the_error_reaches_another_process_whole():
    error = refused(written("F0.0"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.place, copy.action) == (
        str(error),
        0,
        None,
        Action("backward", 0, 0),
    )
    assert isinstance(copy, ValueError)
