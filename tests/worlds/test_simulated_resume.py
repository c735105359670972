"""A simulated federation that is ended and gone on with: the same bits, whatever its world does
meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dure
from dure.federated.strategy import Federated
from small import same_bits, small_task

K, ROUNDS = 8, 12


class Case(NamedTuple):
    """happens: whether that for which the case is here took place in a run."""

    strategy: Federated
    world: dict[str, Any]
    happens: Callable[[dure.Run], bool]


def facts(run: dure.Run) -> dict[str, Any]:
    told: dict[str, Any] = run.summary["facts"][0]
    return told


def liars_change(run: dure.Run) -> bool:
    updates = facts(run)["updates"]
    lied, honest = (
        {client for _, client, lies, *_ in updates if lies == wanted} for wanted in (True, False)
    )
    return bool(lied & honest)


def data_arrive(run: dure.Run) -> bool:
    samples = [step.samples for step in run.history.steps]
    each = [after - before for before, after in zip([0, *samples], samples, strict=False)]
    return max(each) >= 2 * min(each)


def clients_drop_out(run: dure.Run) -> bool:
    return bool(facts(run)["outcomes"].get("dropped out", 0) >= 3)


def rounds_differ(run: dure.Run) -> bool:
    updates = {float((step.numbers or {})["updates"] or 0.0) for step in run.history.steps}
    return len(updates) > 2 and 0.0 in updates


def always(run: dure.Run) -> bool:
    return True


LIES: dict[str, Any] = {"attack": "sign-flip:2", "attackers": 0.5, "attackers_change": True}
ARRIVING: dict[str, Any] = {"arrival": "arriving:0.1:0.5"}
HALF: dict[str, Any] = {"clients": K, "fraction": 0.5, "batch_size": 4}
FEW: dict[str, Any] = {**HALF, "clients": 4}

CASES = {
    "attack-mean": Case(dure.FedAvg(**HALF), LIES, liars_change),
    "attack-median": Case(dure.FedAvg(aggregate="median", **HALF), LIES, liars_change),  # type: ignore[arg-type]
    "attack-async": Case(dure.FedAsync(**FEW), LIES, liars_change),
    "attack-scaffold": Case(dure.Scaffold(**HALF), LIES, liars_change),
    "attack-that-draws": Case(
        dure.FedBuff(buffer=4, **FEW), {**LIES, "attack": "gaussian"}, liars_change
    ),
    "arriving": Case(dure.FedAvg(**HALF), ARRIVING, data_arrive),
    "arriving-async": Case(dure.FedAsync(**FEW), ARRIVING, data_arrive),
    "arriving-buffer": Case(dure.FedBuff(buffer=3, **FEW), ARRIVING, data_arrive),
    "fed-adam": Case(dure.FedAdam(**HALF), {}, always),
    "fed-adagrad": Case(dure.FedAdagrad(**HALF), {}, always),
    "fed-avg-m": Case(dure.FedAvgM(**HALF), {}, always),
    "scaffold-drop-outs": Case(dure.Scaffold(**HALF), {"drop_out": 0.5}, clients_drop_out),
    "buffer-drop-outs": Case(dure.FedBuff(buffer=3, **HALF), {"drop_out": 0.5}, clients_drop_out),
    "poisson": Case(
        dure.FedAvg(clients=K, fraction=0.1, batch_size=4, selection="poisson"),  # type: ignore[arg-type]
        {},
        rounds_differ,
    ),
    "poisson-adam": Case(
        dure.FedAdam(clients=K, fraction=0.1, batch_size=4, selection="poisson"),  # type: ignore[arg-type]
        {},
        rounds_differ,
    ),
}


BATCHED = ("attack-median", "attack-that-draws", "arriving", "scaffold-drop-outs", "poisson")
"""Cases in which it matters who computes: which clients are computed together changes with what
happens. What a server does after them is the same for every engine."""


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "loop") for name in CASES), *((name, "batched") for name in BATCHED)],
)
def test_ended_again_and_again_and_gone_on_with_it_has_the_same_bits(
    name: str, engine: Any, tmp_path: Path
) -> None:
    case = CASES[name]
    world = dure.Simulated(devices="lognormal:1", engine=engine, **case.world)  # type: ignore[arg-type]
    whole = dure.train(
        small_task(), case.strategy, world, dure.Stop(rounds=ROUNDS), evaluate_every=1
    )
    assert case.happens(whole)
    dure.train(
        small_task(), case.strategy, world, dure.Stop(rounds=1), out=tmp_path, evaluate_every=1
    )
    for rounds in (2, 5, ROUNDS):
        again = dure.resume(tmp_path, task=small_task(), stop=dure.Stop(rounds=rounds))
    assert same_bits(whole, again)
    assert facts(whole) == facts(again)
    for one in ("train_loss", "samples", "bytes_sent", "bytes_received"):
        assert whole.summary[one] == again.summary[one]
    assert [step.numbers for step in whole.history.steps] == [
        step.numbers for step in again.history.steps
    ]
    assert [step.loss for step in whole.history.steps] == [
        step.loss for step in again.history.steps
    ]
    evaluations = [[one.metrics for one in run.history.evaluations] for run in (whole, again)]
    assert evaluations[0] == evaluations[1]
