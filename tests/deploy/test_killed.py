"""What is killed, and begun again, goes on: with the bits of a run in which nothing happened.

Seeds are printed; `DURE_SEED` repeats one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import pytest
from deployed import Deployment, Plan

import dure

SEED = int(os.environ.get("DURE_SEED", "0")) or Random().randrange(1, 10**6)

SCAFFOLD = Plan(dure.Scaffold(clients=3, batch_size=4), rounds=12, checkpoint_every=3)
DITTO = Plan(
    dure.Ditto(clients=3, batch_size=4, held_out=0.3),
    rounds=12,
    checkpoint_every=3,
    evaluate_every=4,
)


@pytest.fixture
def random() -> Random:
    print(f"DURE_SEED={SEED}")
    return Random(SEED)


def step(event: dict[str, object]) -> int:
    return int(str(event.get("step", 0)))


@pytest.mark.parametrize("plan", [SCAFFOLD, DITTO], ids=["SCAFFOLD", "Ditto"])
def test_a_server_that_is_killed_goes_on_with_the_same_bits(
    plan: Plan, random: Random, tmp_path: Path
) -> None:
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        for kill in range(1, 3):
            at = kill * plan.rounds // 3
            deployment.server.wait_for("progress", lambda event, at=at: step(event) >= at)
            time.sleep(random.random() * 0.05)
            deployment.restart()
        deployment.ended().check_same(plan.simulated())


@pytest.mark.parametrize("plan", [SCAFFOLD, DITTO], ids=["SCAFFOLD", "Ditto"])
def test_clients_that_are_killed_go_on_with_the_same_bits(
    plan: Plan, random: Random, tmp_path: Path
) -> None:
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        for kill in range(1, 4):
            at = kill * plan.rounds // 4
            deployment.server.wait_for("progress", lambda event, at=at: step(event) >= at)
            time.sleep(random.random() * 0.05)
            number = random.randrange(3)
            deployment.clients[number].kill()
            deployment.join(number)
        deployment.ended().check_same(plan.simulated())
