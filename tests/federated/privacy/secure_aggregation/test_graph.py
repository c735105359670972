from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.federated.privacy.secure_aggregation.graph import FEW, _log2_tails, neighbours, plan

KEY = bytes(range(32))
SIZES = st.integers(3, 60).flatmap(
    lambda n: st.tuples(
        st.just(n), st.one_of(st.just(n - 1), st.integers(1, (n - 1) // 2).map(lambda k: 2 * k))
    )
)


@given(SIZES, st.binary(min_size=32, max_size=32))
def test_everybody_has_so_many_neighbours_who_have_them_too(
    size: tuple[int, int], key: bytes
) -> None:
    members, degree = size
    graph = neighbours(members, degree, key)
    assert len(graph) == members
    for member, others in enumerate(graph):
        assert len(set(others)) == degree
        assert others == sorted(others)
        assert member not in others
        assert all(member in graph[other] for other in others)
    assert together(graph, set(range(members)))


def together(graph: list[list[int]], there: set[int]) -> bool:
    """Whether those who are there are connected."""
    if not there:
        return True
    seen: set[int] = set()
    ahead = [min(there)]
    while ahead:
        member = ahead.pop()
        if member not in seen:
            seen.add(member)
            ahead.extend(set(graph[member]) & there)
    return seen == there


def test_who_has_whom_is_drawn_from_the_key() -> None:
    assert neighbours(50, 6, KEY) == neighbours(50, 6, KEY)
    together_with_0 = [0] * 30
    for at in range(3000):
        for other in neighbours(30, 4, at.to_bytes(32, "big"))[0]:
            together_with_0[other] += 1
    expected = 3000 * 4 / 29
    # Chi-square with 28 degrees of freedom, at a level of 10^-6.
    assert sum((seen - expected) ** 2 / expected for seen in together_with_0[1:]) < 80


@pytest.mark.parametrize(("members", "degree"), [(10, 3), (10, 0), (10, 10), (10, 12), (9, -2)])
def test_impossible_degrees_are_refused(members: int, degree: int) -> None:
    with pytest.raises(ValueError, match="degree"):
        neighbours(members, degree, KEY)


@pytest.mark.parametrize(
    ("members", "corrupt", "drop_out", "degree", "threshold"),
    [
        # google-parfait/federated-compute, graph_parameter_finder_test: semi-honest servers.
        (100, 0.45, 0.45, 92, 46),
        (100, 0.33, 0.33, 68, 34),
        (10_000, 0.33, 0.33, 422, 221),
        (1_000_000, 0.33, 0.33, 518, 270),
        (100, 0.05, 0.33, 28, 6),
        (1_000, 0.05, 0.33, 72, 24),
        (1_000_000, 0.05, 0.33, 102, 34),
        (100, 0.33, 0.05, 34, 29),
        (10_000, 0.33, 0.05, 92, 70),
        (1_000_000, 0.33, 0.05, 110, 83),
    ],
)
def test_plans_are_those_of_the_authors(
    members: int, corrupt: float, drop_out: float, degree: int, threshold: int
) -> None:
    found = plan(members, corrupt, drop_out, sigma=40, eta=20)
    assert found.degree == degree
    # Theirs is the lowest that there is, and here it is the middle.
    assert threshold <= found.threshold <= threshold + 1


@given(
    st.integers(FEW + 1, 3000),
    st.floats(0, 0.3),
    st.floats(0, 0.3),
    st.floats(0, 0.05),
    st.integers(10, 60),
)
@settings(max_examples=40, deadline=None)
def test_whoever_assumes_more_has_no_fewer_neighbours(
    members: int, corrupt: float, drop_out: float, more: float, sigma: int
) -> None:
    degree = plan(members, corrupt, drop_out, sigma).degree
    assert plan(members, corrupt + more, drop_out, sigma).degree >= degree
    assert plan(members, corrupt, drop_out + more, sigma).degree >= degree
    assert plan(members, corrupt, drop_out, sigma + 5).degree >= degree
    assert plan(members, corrupt, drop_out, sigma, eta=45).degree >= degree


@pytest.mark.parametrize("members", [3, 10, FEW])
def test_a_few_have_everybody_as_neighbour(members: int) -> None:
    found = plan(members, 0.05, 0.1)
    assert found.degree == members - 1
    bad = math.ceil(0.05 * members)
    lost = math.floor(0.1 * members)
    assert bad < found.threshold <= members - 1 - lost


@given(st.integers(3, 300), st.floats(0, 0.3), st.floats(0, 0.3))
@settings(deadline=None)
def test_one_share_never_tells_a_secret(members: int, corrupt: float, drop_out: float) -> None:
    try:
        found = plan(members, corrupt, drop_out, sigma=1, eta=1)
    except ValueError:
        return
    assert (
        2
        <= found.threshold
        <= found.degree - math.floor(drop_out * members) * (found.degree == members - 1)
    )


def test_where_no_graph_is_enough_is_refused() -> None:
    with pytest.raises(ValueError, match="may be corrupt"):
        plan(10, 0.5, 0.5)
    with pytest.raises(ValueError, match="select more clients"):
        plan(3, 0.0, 0.4)
    with pytest.raises(ValueError, match="needs at least 3"):
        plan(2, 0.0, 0.0)
    with pytest.raises(ValueError, match="fractions"):
        plan(10, 1.0, 0.0)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_tails_are_exact(population: int, marked: int, drawn: int) -> None:
    marked = min(marked, population)
    drawn = min(drawn, population)
    tails = _log2_tails(population, marked, drawn)
    for least in range(drawn + 1):
        ways = sum(
            math.comb(marked, m) * math.comb(population - marked, drawn - m)
            for m in range(least, drawn + 1)
        )
        if ways:
            assert tails[least] == pytest.approx(
                math.log2(ways) - math.log2(math.comb(population, drawn)), abs=1e-9
            )
        else:
            assert tails[least] == -math.inf


@pytest.mark.parametrize(("corrupt", "drop_out"), [(0.1, 0.2), (0.3, 0.1), (0.25, 0.25)])
def test_weak_plans_fail_no_more_often_than_they_say(corrupt: float, drop_out: float) -> None:
    members = 60
    sigma = 4
    degree, threshold = plan(members, corrupt, drop_out, sigma, sigma)
    assert degree < members - 1
    bad = set(range(math.ceil(corrupt * members)))
    lost = set(range(len(bad), len(bad) + int(drop_out * members)))
    chance = random.Random(0)
    tries = 400
    told = 0
    stopped = 0
    for _ in range(tries):
        graph = neighbours(members, degree, chance.randbytes(32))
        honest = set(range(members)) - bad - lost
        told += not together(graph, honest) or any(
            len(bad & set(graph[one])) >= threshold for one in range(members) if one not in bad
        )
        stopped += any(len(set(graph[one]) - lost) < threshold for one in range(members))
    # Three deviations above what the plan allows.
    allowed = tries * 2**-sigma
    assert told <= allowed + 3 * math.sqrt(allowed)
    assert stopped <= allowed + 3 * math.sqrt(allowed)


def test_a_plan_with_fewer_neighbours_would_fail_too_often() -> None:
    """So the check above can fail: what it counts does happen where too few are asked."""
    members = 60
    bad = set(range(18))
    graphs = [neighbours(members, 4, at.to_bytes(32, "big")) for at in range(100)]
    told = sum(
        any(len(bad & set(graph[one])) >= 4 for one in range(18, members)) for graph in graphs
    )
    assert told > 20
