"""The first rows of a table: the same bits wherever they are made, and normal."""

from __future__ import annotations

from statistics import NormalDist

import numpy
from hypothesis import given
from hypothesis import strategies as st

from dure.parameter_server.first_rows import first_rows, key_of


def rows(*numbers: int) -> numpy.typing.NDArray[numpy.int64]:
    return numpy.array(numbers, dtype=numpy.int64)


@given(
    numbers=st.lists(st.integers(0, 2**40), min_size=1, max_size=9),
    dim=st.integers(1, 9),
    seed=st.integers(0, 5),
)
def test_a_row_is_the_same_among_others_and_alone(numbers: list[int], dim: int, seed: int) -> None:
    key = key_of(seed, 0)
    together = first_rows(key, rows(*numbers), dim)
    alone = [first_rows(key, rows(number), dim)[0] for number in numbers]
    assert numpy.array_equal(together, numpy.stack(alone))


def test_the_bits_are_these_on_every_machine() -> None:
    found = first_rows(12345, rows(0, 1, 10**12), 5)
    assert (found * 2**20).astype(numpy.int64).tolist() == BITS


def test_seeds_tables_and_rows_have_values_of_their_own() -> None:
    keys = {key_of(seed, table) for seed in range(3) for table in range(3)}
    made = numpy.concatenate([first_rows(key, numpy.arange(50), 4) for key in keys])
    assert len(numpy.unique(made, axis=0)) == 9 * 50


def test_they_are_normal() -> None:
    made = first_rows(key_of(1, 0), numpy.arange(50_000), 4).astype(numpy.float64)
    n = made.size
    assert abs(made.mean()) < 4 / n**0.5
    assert abs(made.var() - 1) < 6 / n**0.5
    assert abs(((made**4).mean()) - 3) < 0.1
    # Kolmogorov and Smirnov: the largest difference of 200,000 values is below 2 / sqrt(n).
    ordered = numpy.sort(made.reshape(-1))
    exact = numpy.vectorize(NormalDist().cdf)(ordered[::50])
    assert numpy.abs(exact - numpy.arange(n)[::50] / n).max() < 2 / n**0.5
    # Neighbours in a row, and rows that follow each other, have nothing to do with each other.
    assert abs(numpy.corrcoef(made[:, 0], made[:, 1])[0, 1]) < 0.02
    assert abs(numpy.corrcoef(made[1:, 0], made[:-1, 0])[0, 1]) < 0.02


def test_quantiles_are_rounded_far_from_where_machines_could_differ() -> None:
    count = 1 << 16
    exact = numpy.array(
        [NormalDist().inv_cdf((place + 0.5) / count) * 2**20 for place in range(count // 2, count)]
    )
    assert numpy.abs(exact - numpy.floor(exact) - 0.5).min() > 1e-7


BITS = [
    [-1556476, 442113, 24086, -1165966, 2010003],
    [-142999, 9245, -424727, -1234451, -671682],
    [-1419574, 307325, -1299872, -108661, 235153],
]
