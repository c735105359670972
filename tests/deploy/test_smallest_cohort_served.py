"""A server combines no fewer clients than any of its sites asks for, over a network too."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployed import Deployment, Plan
from scripted import Scripted

import dure
from dure.deploy.client.link import RefusedError
from dure.wire.requests import CheckIn

THREE = Plan(
    dure.FedAvg(clients=3, batch_size=4),
    rounds=1,
    options={"start_with": 1, "heartbeat": 1.0, "deadline": 30.0},
)


def waits(event: dict[str, object]) -> bool:
    return event.get("waiting") == "1 of 2 clients are connected; one of them requires 2"


def test_a_run_waits_for_as_many_clients_as_one_of_them_asks_for(tmp_path: Path) -> None:
    with Deployment(tmp_path, THREE, tls=False) as served:
        served.serve()
        with Scripted(served.url, 0, smallest_cohort=2) as first:
            assert first.welcome.smallest_cohort == 2
            served.server.wait_for("progress", waits)
            assert first.session.next([]).train is None
            # The number is in the journal.
            served.restart()
            served.server.wait_for("progress", waits)
            with Scripted(served.url, 1) as second:
                assert second.welcome.smallest_cohort == 2
                tasks = first.work(), second.work()
                assert [task.smallest_cohort for task in tasks] == [2, 2]
                with pytest.raises(RefusedError, match="has at most 3 clients"):
                    Scripted(served.url, 2, smallest_cohort=10**9)
                with pytest.raises(RefusedError, match="only 2 of them"):
                    first.session.check_in(CheckIn(2, "player 0", 5, wants=0, smallest_cohort=3))
                for site, task in zip((first, second), tasks, strict=True):
                    site.answer(task)
                first.hears_the_end()
                second.hears_the_end()
        assert served.ended().summary["facts"][0]["smallest_cohort"] == 2


def test_a_site_that_asks_for_more_than_updates_are_combined_is_not_taken(tmp_path: Path) -> None:
    plan = Plan(dure.FedAsync(clients=2, fraction=1.0, batch_size=4), rounds=1)
    with Deployment(tmp_path, plan, tls=False) as served:
        served.serve()
        with pytest.raises(RefusedError, match="makes a model of every 1"):
            Scripted(served.url, 0, smallest_cohort=2)
