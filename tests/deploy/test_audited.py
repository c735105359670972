"""The log of a site has a line for every message that leaves it, in every networked system: the
bytes that a proxy has seen, in order, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import Deployment, Plan, tracing
from recorded import check_log, messages
from test_vertical_deployed import Steps
from test_vertical_deployed import by_columns as columns_task

import dure
from dure.deploy.client.audit_log import verify
from dure.deploy.client.state import KEY
from dure.wire.signatures import Key


@pytest.fixture(autouse=True, scope="module")
def loaded() -> Iterator[None]:
    with tracing():
        yield


IN_ALL = {"check-in"}
FEDERATED = {*IN_ALL, "next", "reserve", "update", "metrics"}
SPLIT = {*IN_ALL, "hello", "smashed", "ended", "measured"}

SYSTEMS = {
    "federated": (
        Plan(dure.FedAvg(clients=2, batch_size=4, held_out=0.2), rounds=2),
        FEDERATED,
    ),
    "secure aggregation": (
        Plan(
            dure.FedAvg(clients=3, batch_size=4, privacy=dure.SecureAggregation(most_examples=20)),
            rounds=2,
        ),
        {*IN_ALL, "next", "ready", "answer", "reserve"},
    ),
    "split, heads handed on": (
        Plan(dure.SplitLearning(cut=("1", "2"), clients=2, batch_size=4), rounds=2),
        {*SPLIT, "output-gradients", "sealed", "query"},
    ),
    "split, through the server": (
        Plan(dure.SplitLearning(clients=2, batch_size=4, handover="server"), rounds=1),
        SPLIT - {"measured"},
    ),
    "parallel": (
        Plan(dure.ParallelSplit(clients=2, batch_size=4), rounds=1),
        {*SPLIT, "head-gradients", "query"},
    ),
    "vertical, aligned": (
        Steps(
            dure.VerticalSplit(
                features=("0,1", "2,5", "3,4"),
                batch_size=8,
                label_party=1,
                align=True,
                missing=0.2,
            ),
            4,
            columns_task,
            evaluate_every=2,
            checkpoint_every=2,
        ),
        {*IN_ALL, "hello", "resumed", "blinded", "twice", "aligned", "activations", "evaluated"},
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_message_that_left_has_its_line_and_every_line_its_message(
    name: str, tmp_path: Path
) -> None:
    plan, kinds = SYSTEMS[name]
    with Deployment(tmp_path, plan, tls=False) as deployment:
        deployment.proxy.seen = []
        deployment.serve()
        count = 2 if name.startswith("vertical") else plan.strategy.clients  # type: ignore[attr-defined]
        deployment.join_all(count)
        deployment.ended()
        for client in deployment.clients.values():
            client.wait_for("over")
        seen = messages(deployment.proxy.seen)
    found: set[str] = set()
    for number in range(count):
        site = tmp_path / f"site-{number}"
        key = Key.load_or_create(site / KEY).public
        log = site / "audit.jsonl"
        own = check_log(log, [message for message in seen if message.client == key])
        assert verify(log).lines == len(own)
        found |= set(own)
    # Work that is done soon is not asked about, and not every run comes to a checkpoint.
    assert kinds <= found <= kinds | {"watch", "kept", "next"}
