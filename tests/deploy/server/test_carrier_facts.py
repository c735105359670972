"""What a carrier tells of its clients' machines, also after a restart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dure.deploy.clock import FederationClock
from dure.deploy.journal import Event, Journal
from dure.deploy.server.blob_cache import BlobCache
from dure.deploy.server.carrier import (
    ONCE,
    FederationStores,
    NetworkCarrier,
    ServingSettings,
)
from dure.deploy.server.cohort import CheckInRecord
from dure.deploy.server.model_digests import ModelDigests
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.updates import Updates
from dure.fleet.budget import TransferBudget
from dure.wire.requests import Machine, to_json

MINE = Machine(torch="2.9", capability="AVX2", engine="loop", threads=1)
OTHER = Machine(torch="2.8", capability="AVX2", engine="loop", threads=1)


@pytest.fixture
def made(tmp_path: Path):
    """Makes carriers, each of a folder of its own."""
    journals = []

    def make(name: str) -> NetworkCarrier:
        folder = tmp_path / name
        folder.mkdir()
        clock = FederationClock()
        journal = Journal(folder, clock)
        journals.append(journal)
        federation: Any = SimpleNamespace(clients=3, threads=1, layout=None, holds=False)
        return NetworkCarrier(
            federation=federation,
            stores=FederationStores(
                folder=folder,
                journal=journal,
                clock=clock,
                updates=Updates(folder / "updates"),
                outbox=ClientOutbox(clock.now),
                cache=BlobCache(),
                models=ModelDigests(None),
                once=folder / ONCE,
            ),
            settings=ServingSettings(
                start_with=1, answer_timeout=60.0, measure_seconds=1.0, record=False
            ),
            machine=MINE,
            budget=TransferBudget(None),
            interrupted=lambda: False,
            tell=lambda text: None,
        )

    yield make
    for journal in journals:
        journal.close()


def check_in(carrier: NetworkCarrier, client: int, at: float, machine: Machine | None) -> None:
    here = CheckInRecord(f"ward {client}", 10, 2, machine)
    coordinator: Any = SimpleNamespace(arrive=lambda *_: None, leave=lambda *_: None)
    carrier._apply(coordinator, Event(1, at, "check_in", client, -1, to_json(here)))


def test_bits_are_close_once_one_machine_computes_otherwise(made) -> None:
    carrier = made("run")
    check_in(carrier, 0, 1.0, MINE)
    assert (carrier.facts()["bits"], carrier.facts()["differs"]) == ("same", [])
    check_in(carrier, 1, 2.0, OTHER)
    facts = carrier.facts()
    assert (facts["bits"], facts["differs"]) == ("close", ["torch 2.8, not 2.9"])
    assert [one["differs"] for one in facts["cohort"]] == [[], ["torch 2.8, not 2.9"]]


def test_a_server_that_comes_back_knows_the_machines_that_it_had_met(made) -> None:
    before, after = made("before"), made("after")
    check_in(before, 0, 1.0, OTHER)
    check_in(before, 2, 1.5, None)
    before.events.now = 3.0
    after.restore({**before.state(), "applied": 0})
    assert after.facts() == before.facts()
    assert after.facts()["bits"] == "close"


def test_a_checkpoint_of_before_this_is_read_all_the_same(made) -> None:
    before, after = made("before"), made("after")
    check_in(before, 0, 1.0, OTHER)
    state = before.state()
    del state["machines"], state["presence"]
    after.restore({**state, "applied": 0})
    assert after.facts()["cohort"] == []
