"""One random number for one question."""

from __future__ import annotations

from statistics import fmean, pstdev

from hypothesis import given
from hypothesis import strategies as st

from dure.randomness import hashed_numbers


@given(st.integers(), st.text(), st.lists(st.integers(), max_size=3))
def test_a_uniform_number_is_a_function_of_the_question_and_never_0_or_1(seed, purpose, position):
    number = hashed_numbers.uniform(seed, purpose, *position)
    assert 0 < number < 1
    assert number == hashed_numbers.uniform(seed, purpose, *position)


def test_even_the_extreme_hashes_are_neither_0_nor_1(monkeypatch):
    for hashed in (0, 2**63 - 1):
        monkeypatch.setattr(hashed_numbers, "derive", lambda *question, hashed=hashed: hashed)
        assert 0 < hashed_numbers.uniform(0, "extreme") < 1


def test_uniform_and_normal_numbers_have_their_moments():
    uniform = [hashed_numbers.uniform(0, "moments", k) for k in range(4_000)]
    normal = [hashed_numbers.normal(0, "moments", k) for k in range(4_000)]
    assert abs(fmean(uniform) - 1 / 2) < 0.02
    assert abs(pstdev(uniform) - 12**-0.5) < 0.01
    assert abs(fmean(normal)) < 0.06
    assert abs(pstdev(normal) - 1) < 0.05
