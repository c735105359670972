"""The tail of a message: what each rank says under a name is what all ranks hear under it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.collectives.group import Group
from dure.collectives.trailer import (
    Trailer,
    TrailerField,
    common_start,
    per_rank_field,
    summed_field,
    time_field,
)

# whole numbers, so that sums are exact in whatever order they are added
COUNTS = st.integers(-1000, 1000).map(float)
SECONDS = st.floats(-1.0, 1e6)


@st.composite
def tails(draw: st.DrawFn) -> tuple[list[TrailerField], list[dict[str, list[float]]]]:
    """Fields in any order, and what each rank says; a rank may leave fields out."""
    widths = draw(st.lists(st.integers(0, 4), max_size=4))
    fields = [
        draw(st.sampled_from((summed_field, per_rank_field)))(f"field {number}", width)
        for number, width in enumerate(widths)
    ]
    fields += [time_field(f"time {number}") for number in range(draw(st.integers(0, 2)))]
    fields = draw(st.permutations(fields))
    said = []
    for _ in range(draw(st.integers(1, 5))):
        own = {}
        for field in fields:
            count = 1 if field.is_time else field.width
            if draw(st.booleans()):
                numbers = SECONDS if field.is_time else COUNTS
                own[field.name] = draw(st.lists(numbers, min_size=count, max_size=count))
        said.append(own)
    return fields, said


@given(tails(), st.sampled_from([torch.float32, torch.float64]))
def test_what_each_rank_says_is_what_all_hear_by_name(tail, dtype):
    fields, said = tail
    ranks = len(said)
    ends = [Trailer(fields, rank, ranks) for rank in range(ranks)]
    numbers = [end.encode(own) for end, own in zip(ends, said, strict=True)]
    assert {len(row) for row in numbers} == {end.length for end in ends}
    total = torch.tensor(numbers, dtype=dtype).sum(0).tolist()
    for end in ends:
        heard = end.decode(total)
        assert list(heard) == [field.name for field in fields]
        for field in fields:
            width = 1 if field.is_time else field.width
            rows = [own.get(field.name, [0.0] * width) for own in said]
            if not field.own:
                assert heard[field.name] == [sum(column) for column in zip(*rows, strict=True)]
            elif field.is_time:
                assert heard[field.name] == pytest.approx([row[0] for row in rows], abs=1e-6)
            else:
                assert heard[field.name] == [number for row in rows for number in row]


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 7))
def test_a_tail_is_as_long_as_its_fields(a, b, ranks):
    tail = Trailer(
        [summed_field("a", a), per_rank_field("b", b), time_field("c")], ranks - 1, ranks
    )
    assert tail.length == a + b * ranks + 2 * ranks


def test_a_number_that_is_not_finite_is_heard_from_its_rank_alone():
    ends = [
        Trailer([summed_field("control_flags"), per_rank_field("loss")], rank, 3)
        for rank in range(3)
    ]
    said = [
        {"control_flags": [2.0], "loss": [0.5]},
        {"loss": [float("nan")]},
        {"loss": [float("inf")]},
    ]
    numbers = [end.encode(own) for end, own in zip(ends, said, strict=True)]
    heard = ends[0].decode(torch.tensor(numbers).sum(0).tolist())
    assert heard["control_flags"] == [2.0]
    assert [value == value for value in heard["loss"]] == [True, False, True]
    assert heard["loss"][2] == float("inf")


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="two fields named loss"):
        Trailer([per_rank_field("loss"), summed_field("loss")], 0, 2)
    with pytest.raises(ValueError, match="changed has 3 numbers, not 2"):
        Trailer([summed_field("changed", 3)], 0, 2).encode({"changed": [1.0, 0.0]})
    with pytest.raises(KeyError):
        Trailer([], 0, 2).encode({"control_flags": [1.0]})


def test_times_count_from_a_moment_on_the_clock_of_this_machine():
    import time

    before = time.perf_counter()
    assert before <= common_start(Group(), 100.0) + 1e-6 <= time.perf_counter() + 2e-6
