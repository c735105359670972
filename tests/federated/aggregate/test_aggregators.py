"""What holds for all aggregators: symmetries, what never gets through, text forms, refusals."""

from __future__ import annotations

import math
import random
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_matrices import DIMENSIONS, SEEDS, TURN, close, combine, normal, tied, update, vector

from dure.federated.aggregate import (
    AGGREGATORS,
    RFA,
    Bucketing,
    Bulyan,
    CentredClipping,
    Collects,
    Folds,
    GeometricMedian,
    GeometricMedianOfMeans,
    Krum,
    Mean,
    Median,
    Mixing,
    TrimmedMean,
    UpdateRows,
    clip,
    parse,
)
from dure.federated.aggregate import mean as functions

F = 2
SYMMETRIC = [
    Median(),
    TrimmedMean(0.25),
    Krum(F),
    Krum(F, 4),
    Bulyan(F),
    GeometricMedian(),
    RFA(0.1),
    CentredClipping(2.0, 2),
    Mixing(F, Median()),
    Mixing(F, Krum(F)),
]
FOLDING = [Mean()]
DRAWING = [GeometricMedianOfMeans(5), Bucketing(2, Krum(1)), Bucketing(2, Median())]
NOT_EQUIVARIANT = [clip(2.0, Krum(F)), clip(2.0, GeometricMedian())]
M = 11
"""Updates a round: enough for all of them."""


def all_of(*lists):
    return pytest.mark.parametrize("rule", list(chain(*lists)), ids=str)


@all_of(SYMMETRIC, FOLDING, NOT_EQUIVARIANT, [clip(2.0, Mean())])
@settings(max_examples=12)
@given(DIMENSIONS, SEEDS, st.sampled_from([normal, tied]), st.permutations(range(M)))
def test_the_order_of_updates_does_not_matter(rule, d, seed, matrix, permutation):
    values = matrix(M, d, seed)
    close(combine(rule, values[list(permutation)]), combine(rule, values), 1e-6)


@all_of(SYMMETRIC, FOLDING, DRAWING)
@settings(max_examples=12)
@given(DIMENSIONS, SEEDS, st.floats(-100, 100))
def test_updates_that_are_moved_move_the_result(rule, d, seed, size):
    values, move = normal(M, d, seed), size * normal(1, d, seed + 1)[0]
    close(combine(rule, values + move), combine(rule, values) + move, 1e-7)


@all_of(SYMMETRIC, FOLDING, DRAWING)
@settings(max_examples=12)
@given(DIMENSIONS, SEEDS, st.integers(-60, 60))
def test_updates_that_are_scaled_scale_the_result(rule, d, seed, power):
    values, scale = normal(M, d, seed), 2.0**power
    scaled = {RFA: RFA(0.1 * scale), CentredClipping: CentredClipping(2.0 * scale, 2)}.get(
        type(rule), rule
    )
    close(combine(scaled, scale * values) / scale, combine(rule, values), 1e-7)


@all_of(SYMMETRIC, FOLDING, DRAWING)
@settings(max_examples=12)
@given(DIMENSIONS, SEEDS)
def test_equal_updates_give_that_update(rule, d, seed):
    value = normal(1, d, seed)
    close(combine(rule, value.expand(M, d)), value[0], 1e-14)


@given(
    DIMENSIONS,
    SEEDS,
    st.lists(st.integers(1, 10**6), min_size=1, max_size=M),
    st.randoms(use_true_random=False),
)
def test_the_mean_hangs_on_who_weighs_what_and_not_on_the_order(
    d: int, seed: int, weights: list[int], draws: random.Random
) -> None:
    values, order = normal(len(weights), d, seed), list(range(len(weights)))
    draws.shuffle(order)
    close(
        combine(Mean(), values[order], [weights[k] for k in order]),
        combine(Mean(), values, weights),
        1e-13,
    )
    close(combine(Mean(), values[:1].expand_as(values), weights), values[0], 1e-13)


@all_of(SYMMETRIC, DRAWING, NOT_EQUIVARIANT)
@settings(max_examples=12)
@given(DIMENSIONS, SEEDS, st.integers(1, 60))
def test_the_size_of_blocks_does_not_matter(rule, d, seed, numbers):
    values = normal(M, d, seed)
    close(combine(rule, values, numbers=numbers), combine(rule, values), 1e-9)


@all_of(SYMMETRIC, NOT_EQUIVARIANT, [GeometricMedianOfMeans(5), Bucketing(2, TrimmedMean(0.4))])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("whole", [True, False])
def test_what_liars_send_never_gets_through(rule, bad, whole):
    """F of M send what is nonsense, everywhere or in one coordinate."""
    values = normal(M, 8, 0)
    for liar in (0, 7):
        values[liar, slice(None) if whole else 5] = bad
    honest = values[[k for k in range(M) if k not in (0, 7)]]
    result = combine(rule, values)
    assert torch.isfinite(result).all()
    assert float(result.norm()) <= float(honest.norm(dim=1).max())
    if isinstance(rule, Krum) and rule.m == 1:
        assert any(torch.equal(result, value) for value in honest)


@all_of(SYMMETRIC, DRAWING, NOT_EQUIVARIANT)
def test_more_broken_updates_than_expected_still_give_something_finite(rule):
    for broken in range(1, M):
        values = normal(M, 4, 0)
        values[:broken] = math.nan
        assert torch.isfinite(combine(rule, values)).all()
    with pytest.raises(ValueError, match=r"none of the .* is finite"):
        combine(rule, torch.full((M, 4), math.inf))


@all_of(SYMMETRIC, DRAWING, NOT_EQUIVARIANT)
def test_the_result_has_the_shapes_and_dtypes_of_an_update_and_the_updates_are_left_alone(rule):
    dtypes = (torch.float16, torch.float32, torch.float64)
    updates = [
        [part.to(dtype) for part, dtype in zip(normal(3, 5, k), dtypes, strict=True)]
        for k in range(M)
    ]
    before = [[tensor.clone() for tensor in one] for one in updates]
    result, _ = rule.combine(UpdateRows(updates, [1.0] * M), TURN, None)
    assert [(t.shape, t.dtype) for t in result] == [((5,), dtype) for dtype in dtypes]
    assert all(
        torch.equal(a, b)
        for one, other in zip(updates, before, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    wide = torch.stack([vector([tensor.double() for tensor in one]) for one in updates])
    close(vector([tensor.double() for tensor in result]), combine(rule, wide), 2e-3)


@given(st.integers(1, 9), DIMENSIONS, SEEDS)
def test_what_leaves_nobody_out_is_the_mean(m, d, seed):
    values = normal(m, d, seed)
    rules = [
        Mean(),
        TrimmedMean(0),
        GeometricMedianOfMeans(1),
        Mixing(0),
        Bucketing(m),
        CentredClipping(1e6),
    ]
    for rule in rules + ([Krum(0, m), Bulyan(0)] if m >= 3 else []):
        close(combine(rule, values), values.mean(0))


def test_the_mean_folds_as_its_functions_do():
    values, rule = normal(4, 6, 0), Mean()
    one, other = rule.zero(update(values[0])), functions.zero(update(values[0]))
    for weight, row in enumerate(values, 1):
        one, other = rule.fold(one, update(row), weight), functions.fold(other, update(row), weight)
    assert torch.equal(vector(rule.finish(one)), vector(functions.finish(other)))
    with pytest.raises(ValueError, match="no updates"):
        rule.finish(rule.zero(update(values[0])))


TEXTS = [
    "mean",
    "median",
    "trimmed-mean:0.2",
    "krum:4",
    "krum:4:3",
    "bulyan:2",
    "geometric-median",
    "geometric-median-of-means:5",
    "rfa:0.001",
    "centred-clipping:0.5:3",
    "clipped:1.5/mean",
    "clipped:1.5/krum:2",
    "bucketing:2/krum:1:3",
    "mixing:2/clipped:3.0/bucketing:3/geometric-median",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_forms_are_read_as_they_are_written(text):
    rule = parse(text)
    assert str(rule) == text
    assert isinstance(rule, Collects) == rule.collects == (not isinstance(rule, Folds))


def test_every_aggregator_has_a_text_form_that_is_read_back():
    for name, aggregator in AGGREGATORS.items():
        assert aggregator.name == name
        assert parse(str(aggregator())) == aggregator()
    assert {text.split(":")[0].split("/")[0] for text in TEXTS} == set(AGGREGATORS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("medain", "no aggregator 'medain', did you mean 'median'"),
        ("krum:a", "'a' is not an integer; write krum:F:M"),
        ("krum:1:2:3", "too many values: write krum:F:M"),
        ("krum:1/mean", "krum wraps no other; leave out '/mean'"),
        ("median/", "median wraps no other; leave out '/'"),
        ("clipped:10", "write clipped:10/median, for example"),
        ("clipped:10:2/mean", "too many values: write clipped:NORM"),
        ("bucketing:2/none", "no aggregator 'none'"),
        ("bucketing:2/", "no aggregator ''"),
        ("krum:-1", "krum: f is -1, but it has to be 0 or more"),
        ("krum:1:0", "krum: m is 0, but it has to be 1 or more"),
        ("trimmed-mean:0.5", r"in \[0, 0.5\)"),
        ("trimmed-mean:nan", r"in \[0, 0.5\)"),
        ("bulyan:-1", "bulyan: f is -1, but it has to be 0 or more"),
        ("geometric-median-of-means:0", "k is 0, but it has to be 1 or more"),
        ("rfa:0", "rfa: nu is 0.0, but it has to be greater than 0 and finite"),
        ("centred-clipping:inf", "centred-clipping: tau is inf, but it has to be greater than 0"),
        ("centred-clipping:1:0", "centred-clipping: iterations is 0, but it has to be 1 or more"),
        ("clipped:0/mean", "clipped: norm is 0.0, but it has to be greater than 0 and finite"),
        ("clipped:-1/median", "clipped: norm is -1.0, but it has to be greater than 0 and finite"),
        ("bucketing:0/median", "bucketing: s is 0, but it has to be 1 or more"),
        ("mixing:-1/median", "mixing: f is -1, but it has to be 0 or more"),
    ],
)
def test_what_is_no_aggregator_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("mean", 1),
        ("median", 1),
        ("rfa", 1),
        ("krum:3", 9),
        ("bulyan:3", 15),
        ("geometric-median-of-means:7", 7),
        ("mixing:3/median", 7),
        ("bucketing:3/krum:2", 19),
        ("clipped:1/bulyan:1", 7),
        ("clipped:1/mean", 1),
    ],
)
def test_too_few_updates_are_refused_with_the_number_needed(text, least):
    parse(text).check(least)
    with pytest.raises(ValueError, match="needs at least"):
        parse(text).check(least - 1)
