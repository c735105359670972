"""A run that was recorded is gone through again, and comes to the same bits: also where nobody knew
beforehand in which order clients would answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployed import Deployment, Ended, Plan

import dure
from dure.run.replay import replay

PLANS = {
    "FedAsync": Plan(
        dure.FedAsync(clients=3, fraction=1.0, batch_size=4),
        rounds=30,
        options={"record": True},
    ),
    "FedBuff": Plan(
        # Updates come while others measure: they wait, and checkpoints have them.
        dure.FedBuff(clients=3, fraction=1.0, buffer=2, batch_size=4, held_out=0.3),
        rounds=20,
        options={"record": True},
        evaluate_every=2,
        checkpoint_every=2,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_recorded_run_has_the_same_bits_when_it_is_replayed(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        deployment.server.wait_for("progress", lambda event: event.get("step", 0) >= 7)
        # The second server goes through the journal of the first.
        deployment.restart()
        ended: Ended = deployment.ended()
    assert ended.summary["steps"] == plan.rounds
    replayed = replay(deployment.run, task=plan.task())
    assert (replayed.rounds, replayed.same) == (plan.rounds, True)
