"""The cost model: its formulas against numbers by hand, fits that find what made the samples, and
crossovers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dure.collectives import cost
from dure.collectives.cost import Calibration, Crossover, LinkCost, MeasuredAllReduce

CLUSTER = LinkCost(alpha=1e-5, beta=1e-9, gamma=1e-10)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("algorithm", "waits", "sent", "reduced"),
    [
        ("ring", 14, 14 / 8, 7 / 8),
        ("one_shot", 2, 14 / 8, 7 / 8),
        ("hierarchical", 2, 14 / 8, 7 / 8),
        ("halving_doubling", 6, 14 / 8, 7 / 8),
        ("tree", 6, 6, 3),
        ("master", 14, 14, 7),
    ],
)
def test_the_critical_path_on_eight_machines(
    algorithm: str, waits: int, sent: float, reduced: float
) -> None:
    expected = waits * 1e-5 + sent * MIB * 1e-9 + reduced * MIB * 1e-10
    assert cost.predict(algorithm, MIB, 8, CLUSTER) == pytest.approx(expected, rel=1e-12)


def test_halving_of_six_ranks_is_folded_into_four() -> None:
    waits, _, sent, reduced = cost.counts("halving_doubling", MIB, 6)
    assert (waits, sent, reduced) == (6, 2 * (3 / 4 + 1) * MIB, (3 / 4 + 1) * MIB)


@pytest.mark.parametrize(
    ("algorithm", "waits", "messages", "sent", "reduced"),
    [
        ("ring", 24, 24, 6, 3 / 4),
        ("one_shot", 8, 24, 6, 3 / 4),
        ("halving_doubling", 16, 16, 6, 3 / 4),
        ("tree", 6, 6, 6, 2),
        ("master", 6, 6, 6, 3),
    ],
)
def test_on_a_shared_host_the_work_of_four_ranks_adds_up(
    algorithm: str, waits: int, messages: int, sent: int, reduced: float
) -> None:
    assert cost.counts(algorithm, MIB, 4, shared=True) == (
        waits,
        messages,
        sent * MIB,
        reduced * MIB,
    )


def test_what_a_rank_sends_is_the_algorithm_s_own_formula() -> None:
    assert [cost.bytes_sent("master", 40, 3, rank) for rank in range(3)] == [80, 40, 40]
    assert [cost.messages_sent("ring", 40, 3, rank) for rank in range(3)] == [4, 4, 4]
    assert sum(cost.bytes_sent("ring", 40, 3, rank) for rank in range(3)) == 4 * 40


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
def test_one_rank_and_no_bytes_cost_nothing(algorithm: str) -> None:
    assert cost.predict(algorithm, MIB, 1, CLUSTER) == 0
    assert cost.predict(algorithm, 0, 4, CLUSTER) == 0


def test_an_algorithm_without_known_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="the cost of 'native' is not known; choose one of ring"):
        cost.predict("native", MIB, 4, CLUSTER)


SIZES = [4096 * 4**step for step in range(8)]


@pytest.mark.parametrize(
    "link",
    [
        LinkCost(3e-4, 4e-10, 2e-10, 8e-5, True),
        LinkCost(2e-6, 1e-10, 0, 1e-6, True),
        LinkCost(0, 1e-9, 1e-9, 1e-5, True),
    ],
)
def test_a_fit_of_two_algorithms_finds_the_link_that_made_their_times(link: LinkCost) -> None:
    samples = [
        MeasuredAllReduce(name, n, 8, cost.predict(name, n, 8, link))
        for name in ("tree", "one_shot")
        for n in SIZES
    ]
    found = cost.fit(samples, shared=True)
    for name in ("alpha", "beta", "gamma", "overhead"):
        assert getattr(found, name) == pytest.approx(getattr(link, name), rel=1e-6, abs=1e-15)


def test_with_a_machine_for_each_rank_gamma_is_found_in_beta() -> None:
    link = LinkCost(3e-4, 4e-10, 2e-10)
    samples = [
        MeasuredAllReduce(name, n, 8, cost.predict(name, n, 8, link))
        for name in ("ring", "one_shot")
        for n in SIZES
    ]
    found = cost.fit(samples)
    assert (found.alpha, found.beta) == pytest.approx((3e-4, 5e-10), rel=1e-6)
    assert (found.gamma, found.overhead) == pytest.approx((0, 0), abs=1e-15)
    for name in cost.ALGORITHMS:
        assert cost.predict(name, MIB, 8, found) == pytest.approx(
            cost.predict(name, MIB, 8, link), rel=1e-6
        )


def test_a_fit_of_noisy_samples_predicts_an_algorithm_it_has_not_seen() -> None:
    link, noise = LinkCost(2e-4, 3e-10, 3e-10, 8e-5, True), random.Random(0)
    samples = [
        MeasuredAllReduce(
            name, size, 4, cost.predict(name, size, 4, link) * noise.uniform(0.9, 1.1)
        )
        for name in ("tree", "one_shot")
        for size in SIZES
    ]
    found = cost.fit(samples, shared=True)
    assert min(found.alpha, found.beta, found.gamma, found.overhead) >= 0
    for size in (4096, MIB, 64 * MIB):
        assert cost.predict("ring", size, 4, found) == pytest.approx(
            cost.predict("ring", size, 4, link), rel=0.2
        )


def test_reducing_a_byte_is_never_dearer_than_sending_it() -> None:
    link = LinkCost(2e-4, 1e-10, 9e-10, 8e-5, True)
    samples = [
        MeasuredAllReduce(name, n, 8, cost.predict(name, n, 8, link))
        for name in ("tree", "one_shot")
        for n in SIZES
    ]
    found = cost.fit(samples, shared=True)
    assert 0 < found.gamma == found.beta


def test_nothing_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        cost.fit([])


def test_a_crossover_is_where_two_formulas_meet() -> None:
    link = LinkCost(alpha=1e-5, beta=1e-9, gamma=0)
    # On four ranks a tree waits 4 times for all bytes, a ring 6 times for a quarter: 2 alpha = 2.5
    # n beta.
    (found,) = cost.crossovers(4, link, ("tree", "ring"))
    assert (found.before, found.after) == ("tree", "ring")
    assert found.nbytes == pytest.approx(2e-5 / 2.5e-9, abs=8)
    assert cost.best(found.nbytes - 8, 4, link, ("tree", "ring")) == "tree"
    assert cost.best(found.nbytes + 8, 4, link, ("tree", "ring")) == "ring"


def test_without_latency_nothing_changes() -> None:
    assert cost.crossovers(8, LinkCost(0, 1e-9, 0)) == []
    assert Crossover(1, "a", "b").after == "b"


def test_a_calibration_is_kept_by_backend_ranks_and_cores(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "all-reduce.json"
    assert Calibration.load(file).links == {}
    links = {
        ("gloo", 2, 2): CLUSTER,
        ("gloo", 8, 2): LinkCost(1, 2, 3, 4, True),
        ("gloo", 8, 64): LinkCost(5, 6, 7),
    }
    Calibration(links).save(file)
    kept = Calibration.load(file)
    assert kept.links == links
    assert kept.link("gloo", 3, 2) == CLUSTER
    assert kept.link("gloo", 16, 2) == LinkCost(1, 2, 3, 4, True)
    assert kept.predictor("gloo", 2)("ring", MIB, 2) == cost.predict("ring", MIB, 2, CLUSTER)
    with pytest.raises(
        ValueError,
        match="the cost of gloo on 4 cores is unknown: measure it with dure bench all-reduce --fit",
    ):
        kept.link("gloo", 2, 4)
    file.write_text('{"links": [{"alpha": 1}]}')
    assert Calibration.load(file).links == {}
