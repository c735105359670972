"""Clients that take part in new models: shares, and whoever has left is named once."""

from __future__ import annotations

import json

import dure
from dure.federated.server.participation import Participation
from dure.report.facts import federation_of
from small import small_task


def part() -> Participation:
    return Participation(lambda client: f"client {client}")


def test_shares_are_of_the_clients_and_of_their_examples() -> None:
    one = part()
    assert one.made(1, [0, 2], [10, 30, 60], {0, 1, 2}, knows_sizes=True) is None
    assert one.shares == {"clients_share": 2 / 3, "examples_share": 0.7}
    one.made(2, [0, 2], [1, 1, 1], {0, 1, 2}, knows_sizes=False)
    assert one.shares == {"clients_share": 2 / 3}
    one.made(3, None, [10, 30, 60], {0, 1, 2}, knows_sizes=True)
    assert one.shares == {}


def test_a_server_that_goes_on_alone_says_so_and_names_who_has_left() -> None:
    one = part()
    one.made(1, [0, 1, 2], [10, 30, 60], {0, 1, 2}, knows_sizes=True)
    told = one.made(2, [0], [10, 30, 60], {0}, knows_sizes=True)
    assert told is not None
    assert told.startswith(
        "round 2: 1 of 3 clients is connected, without client 1, client 2, who left; the new model "
        "is of 10% of the examples"
    )
    assert one.made(3, [0], [10, 30, 60], {0}, knows_sizes=True) is None
    assert one.facts() == {
        "left": [(1, 2), (2, 2)],
        "took_part": {"clients": 3, "clients_share": 1 / 3, "examples_share": 0.1},
    }
    again = part()
    again.restore(one.state())
    assert again.made(4, [0], [10, 30, 60], {0}, knows_sizes=True) is None
    assert again.facts() == one.facts()


def test_who_comes_back_is_missing_no_more_and_who_leaves_again_is_told_of() -> None:
    one = part()
    one.made(1, [0, 1], [1, 1], {0, 1}, knows_sizes=True)
    assert one.made(2, [0], [1, 1], {0}, knows_sizes=True) is not None
    assert one.made(3, [0, 1], [1, 1], {0, 1}, knows_sizes=True) is None
    assert one.facts() == {}
    assert one.made(4, [0], [1, 1], {0}, knows_sizes=True) is not None


def test_the_history_has_the_shares_of_each_round() -> None:
    run = dure.train(
        small_task(), dure.FedAvg(clients=4, fraction=0.5, batch_size=4), stop=dure.Stop(rounds=2)
    )
    for step in run.history.steps:
        assert step.numbers is not None
        assert step.numbers["clients_share"] == 0.5
        assert 0 < (step.numbers["examples_share"] or 0) < 1
    (facts,) = run.summary["facts"]
    assert "left" not in facts


def test_the_report_reads_who_was_missing() -> None:
    one = part()
    one.made(1, [0, 1], [1, 3], {0, 1}, knows_sizes=True)
    one.made(2, [1], [1, 3], {1}, knows_sizes=True)
    facts = json.loads(json.dumps({"flights": [], **one.facts()}))
    federation = federation_of({"facts": [facts]})
    assert federation is not None
    assert federation.left == {0: 2}
    assert federation.took_part["examples_share"] == 0.75
