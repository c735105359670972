"""The federation's clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.deploy.clock import FederationClock


class Other:
    """A clock that passes when it is told."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_it_stands_until_it_is_told_to_run() -> None:
    other = Other()
    clock = FederationClock(5.0, other)
    other.at += 3
    assert clock.now() == 5.0
    clock.run()
    other.at += 3
    assert clock.now() == 8.0


def test_it_stands_for_as_long_as_it_is_held_and_then_runs() -> None:
    other = Other()
    clock = FederationClock(0.0, other)
    clock.begin_at(7.5)
    clock.hold(10.0)
    other.at += 9
    assert clock.now() == 7.5
    other.at += 3
    assert clock.now() == 9.5


def test_a_shorter_hold_or_a_run_does_not_end_a_longer_one() -> None:
    other = Other()
    clock = FederationClock(0.0, other)
    clock.hold(10.0)
    other.at += 1
    clock.hold(2.0)
    clock.run()
    other.at += 8
    assert clock.now() == 0.0
    other.at += 3
    assert clock.now() == 2.0


def test_it_begins_nowhere_before_where_it_is() -> None:
    clock = FederationClock(3.0)
    clock.begin_at(2.0)
    assert clock.now() == 3.0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.floats(-0.5, 5)),
            st.tuples(st.just("hold"), st.floats(0, 5)),
            st.tuples(st.just("run"), st.none()),
        )
    )
)
def test_it_never_runs_back_and_never_ahead_of_the_other(steps: list[tuple[str, float]]) -> None:
    other = Other()
    clock = FederationClock(0.0, other)
    before, most = clock.now(), 0.0
    for what, seconds in steps:
        if what == "pass":
            other.at += seconds
            most += max(0.0, seconds)
        elif what == "hold":
            clock.hold(seconds)
        else:
            clock.run()
        assert before <= clock.now() <= most + 1e-9
        before = clock.now()
