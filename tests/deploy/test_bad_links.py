"""Links that break, stall, swallow and repeat what is sent: a run comes to the same bits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from deployed import Deployment, Plan
from proxy import Harm
from scripted import Scripted

import dure

SEED = int(os.environ.get("DURE_SEED", "0")) or Random().randrange(1, 10**6)

PLAN = Plan(dure.Scaffold(clients=3, batch_size=4), rounds=6, checkpoint_every=4)


@pytest.fixture
def random() -> Random:
    print(f"DURE_SEED={SEED}")
    return Random(SEED)


def harms(random: Random) -> Iterator[Harm]:
    """Many connections are cut somewhere, among them in the midst of heads, bodies and records of
    TLS."""
    # Clients keep their connections, so there are few: two are cut soon, whatever is drawn.
    yield Harm(up=random.randrange(1, 2_000))
    yield Harm(down=random.randrange(1, 2_000))
    while True:
        kind = random.choice(["none", "up", "down", "delay", "hole"])
        yield Harm(
            up=random.randrange(1, 12_000) if kind == "up" else None,
            down=random.randrange(1, 12_000) if kind == "down" else None,
            delay=random.random() * 0.05 if kind == "delay" else 0.0,
            hole=0.3 if kind == "hole" else 0.0,
        )


@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plain"])
def test_a_run_over_bad_links_has_the_bits_of_one_over_good_ones(
    tls: bool, random: Random, tmp_path: Path
) -> None:
    with Deployment(tmp_path, PLAN, tls=tls) as deployment:
        lock = threading.Lock()
        drawn = harms(random)

        def draw() -> Harm:
            with lock:
                return next(drawn)

        deployment.proxy.harm = draw
        deployment.serve()
        deployment.join_all(3)
        deployment.ended(90).check_same(PLAN.simulated())
        assert deployment.proxy.cuts, "nothing was done to the links"


def test_a_link_that_swallows_everything_is_given_up_by_its_client(tmp_path: Path) -> None:
    plan = Plan(dure.FedAvg(clients=2, batch_size=4), options={"heartbeat": 0.2})
    with Deployment(tmp_path, plan, tls=False) as deployment:
        deployment.serve()
        with Scripted(deployment.url, 0) as player:
            player.session.next([])
            connections = deployment.proxy.connections
            deployment.proxy.swallow()
            began = time.monotonic()
            player.session.next([])
            # The server answers within 0.6 s; then the client asks elsewhere.
            assert time.monotonic() - began < 15
            assert deployment.proxy.connections > connections


def test_what_is_sent_twice_counts_once(tmp_path: Path) -> None:
    plan = Plan(dure.FedAvg(clients=1, batch_size=4), rounds=3)
    with Deployment(tmp_path, plan, tls=False) as deployment:
        deployment.serve()
        deployment.proxy.twice = True
        with Scripted(deployment.url, 0) as player:
            for _ in range(3):
                player.answer(player.work())
            ended = deployment.ended()
        assert ended.facts["outcomes"] == {"accepted": 3}
        assert deployment.proxy.repeated, "nothing was sent twice"
