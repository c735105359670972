"""Buffers beside weights: norms and distances are of weights alone, whatever buffers are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dure.federated.aggregate import Collects, Folds, UpdateRows, parse
from dure.federated.server.global_model import GlobalModel
from dure.protocol.messages import Update
from dure.randomness.seeds import RoundSeed

UPDATES = 9
RULES = [
    *("mean", "median", "trimmed-mean:0.2", "krum:2", "krum:2:4", "bulyan:1", "geometric-median"),
    *("geometric-median-of-means:3", "rfa", "centred-clipping:0.5:2", "clipped:0.5/mean"),
    *("clipped:0.5/median", "clipped:0.5/krum:2", "clipped:0.5/geometric-median"),
    *("bucketing:2/median", "bucketing:2/clipped:0.5/mean", "mixing:2/krum:2"),
    *("clipped:0.5/bucketing:2/krum:1", "bucketing:2/mean", "mixing:2/centred-clipping:0.5"),
]


def updates(large: float) -> list[list[Tensor]]:
    """Weights in two tensors, then a buffer whose numbers are as large as that."""
    draws = torch.Generator().manual_seed(0)

    def drawn(size: int) -> Tensor:
        return torch.randn(size, generator=draws, dtype=torch.float64)

    return [[drawn(5), drawn(3), large * drawn(4)] for _ in range(UPDATES)]


def combined(text: str, rows: list[list[Tensor]], rounds: int = 2) -> list[Tensor]:
    """By the server, whose rule has a state of its own from round to round."""
    model = GlobalModel(
        [torch.zeros(5).double(), torch.zeros(3).double()],
        [torch.zeros(4).double()] if len(rows[0]) == 3 else [],
        parse(text),
    )
    for number in range(rounds):
        for client, row in enumerate(rows):
            sent = Update(client, client, number, 1 + client, 1, 0.5, row[:2], row[2:])
            model.fold(sent, 1.0, float(sent.examples))
        model.finish(0)
    return [*model.weights, *model.buffers]


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("large", [0.0, 1.0, 1e6])
def test_what_a_rule_makes_of_weights_does_not_depend_on_buffers(text: str, large: float) -> None:
    rows = updates(large)
    alone = combined(text, [row[:2] for row in rows])
    beside = combined(text, rows)
    for one, other in zip(alone, beside[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("text", RULES)
def test_buffers_stay_among_those_of_the_clients(text: str) -> None:
    """Also where all are clipped: statistics that move by a share alone are those of no data."""
    rows = updates(100.0)
    moved = combined(text, [[*row[:2], row[2] + 1e4] for row in rows], rounds=1)[2]
    least = torch.stack([row[2] for row in rows]).amin(0) + 1e4
    most = torch.stack([row[2] for row in rows]).amax(0) + 1e4
    assert bool((moved >= least - 1e-6).all() and (moved <= most + 1e-6).all())


def test_krum_takes_the_buffers_of_the_client_that_it_chooses() -> None:
    rows = updates(1e6)
    chosen = combined("krum:2", rows, rounds=1)
    (which,) = [row for row in rows if torch.equal(row[0], chosen[0])]
    assert torch.equal(which[2], chosen[2])


def test_a_rule_that_folds_has_the_mean_of_buffers_by_examples() -> None:
    rows = updates(10.0)
    weights = torch.arange(1.0, UPDATES + 1).double()
    expected = (weights @ torch.stack([row[2] for row in rows])) / weights.sum()
    for text in ("mean", "clipped:0.5/mean"):
        torch.testing.assert_close(combined(text, rows, rounds=1)[2], expected)


def test_distances_are_of_what_is_measured_for_rows_and_for_mixtures() -> None:
    rows = UpdateRows(updates(1e6), [1.0] * UPDATES, measured=2)
    alone = UpdateRows([row[:2] for row in updates(1e6)], [1.0] * UPDATES)
    groups = [[0, 3], [1, 2, 4], [5]]
    three = torch.full((3,), 3.0).double()
    for one, other in (
        (rows, alone),
        (rows.grouped(groups), alone.grouped(groups)),
        (rows.scaled(torch.arange(9.0).double()), alone.scaled(torch.arange(9.0).double())),
        (rows.grouped(groups).scaled(three), alone.grouped(groups).scaled(three)),
    ):
        torch.testing.assert_close(one.distances(), other.distances())
        torch.testing.assert_close(one.squared_distances(), other.squared_distances())


def test_scaled_rows_keep_what_is_not_measured() -> None:
    rows = updates(3.0)
    halved = UpdateRows(rows, [1.0] * UPDATES, measured=2).scaled(
        torch.full((UPDATES,), 0.5).double()
    )
    for index, row in enumerate(rows):
        got = halved.row(index)
        torch.testing.assert_close(got[0], row[0] / 2)
        assert torch.equal(got[2], row[2])


@pytest.mark.parametrize("text", RULES)
def test_rules_say_whether_they_fold(text: str) -> None:
    rule: Any = parse(text)
    assert isinstance(rule, Collects if rule.collects else Folds)
    if isinstance(rule, Collects):
        made, _ = rule.combine(
            UpdateRows(updates(1.0), [1.0] * UPDATES, measured=2), RoundSeed(0, 0)
        )
        assert [part.shape for part in made] == [(5,), (3,), (4,)]
