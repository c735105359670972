"""Attacks on complex updates, and what is recorded of them: a complex number is two real ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dure
from dure.federated.server.combining import RoundResult
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.log import Log
from dure.fleet.attacks import parse_attack
from small import small_task

ATTACKS = [
    *("sign-flip:3", "gaussian:1", "noise:0.5", "large:7", "nan", "inf"),
    *("alie:1.5", "inner-product:0.5", "mimic"),
]


def drawn(seed: int, dtype: torch.dtype = torch.complex128) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draws, dtype=dtype) for size in (5, 2)]


@pytest.mark.parametrize("text", ATTACKS)
def test_a_complex_update_is_forged_as_its_real_and_imaginary_parts(text: str) -> None:
    updates = [drawn(seed) for seed in range(6)]
    parts = [[torch.view_as_real(part) for part in update] for update in updates]
    attack = parse_attack(text)
    forged = attack.forge(updates, [1, 4], seed=0, turn=2)
    expected = attack.forge(parts, [1, 4], seed=0, turn=2)
    for client in range(6):
        for got, like in zip(forged[client], expected[client], strict=True):
            assert got.is_complex()
            assert torch.equal(torch.view_as_real(got).nan_to_num(), like.nan_to_num())
            assert torch.equal(torch.view_as_real(got).isnan(), like.isnan())
    assert forged[0] is updates[0]


def test_norms_and_cosines_of_complex_updates_have_both_parts() -> None:
    log = Log(lambda round: [0])
    update = [torch.tensor([3.0 + 4.0j, 0.0]), torch.tensor([12.0j])]
    log.saw(0, 0, [torch.view_as_real(part) for part in update])
    before = [torch.zeros(2, dtype=torch.complex64), torch.zeros(1, dtype=torch.complex64)]
    log.moved(0, before, [-part for part in update])
    ((_, client, lies, norm, cosine),) = log.updates
    assert (client, lies) == (0, True)
    assert norm == pytest.approx(13.0)
    assert cosine == pytest.approx(-1.0)


def test_a_refused_update_is_recorded_without_numbers() -> None:
    log = Log(lambda round: [0])
    log.saw(1, 0, None)
    log.moved(0, [torch.zeros(1)], [torch.ones(1)])
    assert log.updates == [[0, 1, False, None, None]]
    log.flew([], RoundResult(None, 0, [], [], {7: "it is not finite"}, [1]))
    assert log.facts()["refused_clients"] == [(1, 1)]


def test_what_is_recorded_is_what_the_rule_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale update counts for less, and its recorded norm is that of what counts."""
    world = dure.Simulated(attack="sign-flip:1", attackers=1, devices="lognormal:2")
    strategy = dure.FedBuff(clients=6, fraction=1.0, buffer=2)
    seen: list[float] = []
    fold = GlobalModel.fold

    def noted(self: Any, update: Any, scale: float, weight: float, start: Any = None) -> Any:
        parts = fold(self, update, scale, weight, start)
        seen.append(scale * math.sqrt(sum(float(d.square().sum()) for d in update.delta)))
        return parts

    monkeypatch.setattr(GlobalModel, "fold", noted)
    run = dure.train(small_task(), strategy, world, dure.Stop(rounds=8))
    recorded = [norm for *_, norm, _ in run.summary["facts"][0]["updates"]]
    assert recorded == pytest.approx(seen, rel=1e-9)
    assert any(step.numbers["staleness"] for step in run.history.steps if step.numbers)
