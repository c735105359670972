"""A client that spoils sums stops a round, and no run; clients contribute to one sum of a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import dure
from dure.errors import TooFewClientsError
from dure.federated.privacy.secure_aggregation.client import SecureSumClient
from dure.federated.privacy.secure_aggregation.cohort import SHARE, UNMASK
from dure.federated.privacy.secure_aggregation.messages import (
    SecretShare,
    SharesForNeighbours,
    Unmasked,
    from_body,
    to_body,
)
from dure.federated.server.coordinator import Coordinator
from small import same_bits, small_task

LIAR = 2

Lie = Callable[[int, bytes], bytes]


def boxes(stage: int, body: bytes) -> bytes:
    """Shares that open for nobody."""
    if stage != SHARE:
        return body
    shared = from_body(body, SharesForNeighbours)
    garbage = [msgspec.structs.replace(one, box=bytes([7]) * len(one.box)) for one in shared.shares]
    return to_body(SharesForNeighbours(shared.commitment, tuple(garbage)))


def another_seed(stage: int, body: bytes) -> bytes:
    """Shares that fit, of a secret that does not."""
    if stage != SHARE:
        return body
    return to_body(
        msgspec.structs.replace(from_body(body, SharesForNeighbours), commitment=bytes(32))
    )


def pieces(stage: int, body: bytes) -> bytes:
    """Wrong shares in the end."""
    if stage != UNMASK:
        return body
    given = from_body(body, Unmasked)
    wrong = [SecretShare(one.client, bytes([1, 0, 0, 0] * 9)) for one in given.survivors]
    return to_body(Unmasked(tuple(wrong), given.lost))


def garbage(stage: int, body: bytes) -> bytes:
    return os.urandom(20)


def lies(monkeypatch: pytest.MonkeyPatch, lie: Lie) -> None:
    """Client `LIAR` says other things than it would."""
    honest = SecureSumClient.answer

    def answer(self: SecureSumClient, stage: int, body: bytes) -> Any:
        said, tensor = honest(self, stage, body)
        return (said, tensor) if self._number != LIAR else (lie(stage, said), tensor)

    monkeypatch.setattr(SecureSumClient, "answer", answer)


def trained(clients: int = 6, rounds: int = 3, **settings: Any) -> dure.Run:
    how = {"privacy": "secure-aggregation", **settings.pop("strategy", {})}
    strategy = dure.FedAvg(clients=clients, batch_size=4, **how)
    return dure.train(small_task(), strategy, stop=dure.Stop(rounds=rounds), **settings)


@pytest.mark.parametrize(
    ("lie", "counts", "why"),
    [
        (boxes, [0, 5, 5], "its shares do not open or fit its commitments, say 5 of the 6"),
        (pieces, [6, 5, 5], "its share of client 0's secret is not the one that client 0 has"),
        (garbage, [5, 5, 5], "the message is not a valid Advertised"),
    ],
)
def test_who_spoils_a_sum_is_not_in_the_next_one_and_is_named(
    lie: Lie, counts: list[int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies(monkeypatch, lie)
    with pytest.warns(UserWarning, match="client 2 is excluded, because it has violated"):
        run = trained()
    assert [step.numbers["updates"] for step in run.history.steps] == counts
    [[client, reason]] = run.summary["facts"][0]["excluded"]
    assert client == LIAR
    assert why in reason


def test_a_run_that_was_resumed_does_not_ask_who_was_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies(monkeypatch, boxes)
    once = trained(rounds=4)
    trained(rounds=2, out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(rounds=4))
    assert same_bits(once, again)
    assert again.summary["facts"][0]["excluded"] == once.summary["facts"][0]["excluded"]


def test_a_run_in_which_all_have_helped_for_nothing_ends_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lies(monkeypatch, another_seed)
    why = (
        r"round 1: 0 of 6 clients are left for a sum of at least 3: 5 have helped to unmask a sum "
        r"of this model, which has not changed since, and contribute to no other, and 1 are exclu"
    )
    with pytest.raises(TooFewClientsError, match=why):
        trained()


def test_a_run_whose_excluded_clients_leave_too_few_ends_by_name_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lies(monkeypatch, boxes)
    honest = Coordinator.__post_init__

    def asked_for_all(self: Coordinator) -> None:
        honest(self)
        for client in range(4):
            self.arrive(client)
        self.require_clients(4)
        self.patient = True

    monkeypatch.setattr(Coordinator, "__post_init__", asked_for_all)
    privacy = "secure-aggregation:0.7:1:1000:4"
    why = "round 1: 3 of 4 clients are left for a sum of at least 4: 0 have .* and 1 are excluded"
    with pytest.raises(TooFewClientsError, match=why):
        trained(clients=4, strategy={"privacy": privacy})


def test_those_who_have_helped_sit_out_until_the_model_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lies(monkeypatch, another_seed)
    asked: list[list[int]] = []
    honest = dure.federated.client.clients.FederatedClients.train

    def noted(self: Any, orders: Any, ahead: Any) -> Any:
        asked.append(sorted(one.assignment.client for one in orders))
        return honest(self, orders, ahead)

    monkeypatch.setattr(dure.federated.client.clients.FederatedClients, "train", noted)
    run = trained(clients=12, rounds=8, strategy={"fraction": 0.4})
    failed = next(at for at, one in enumerate(asked) if LIAR in one)
    assert run.history.steps[failed].numbers["updates"] == 0
    assert not set(asked[failed]) & set(asked[failed + 1])
    assert run.history.steps[failed + 1].numbers["updates"] == len(asked[failed + 1])
    # The model has changed: all but the one that is excluded come again.
    later = {client for one in asked[failed + 2 :] for client in one}
    assert LIAR not in later
    assert set(asked[failed]) & later


def test_a_vector_that_is_none_spoils_a_round_and_nobody_can_be_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = SecureSumClient._mask

    def masked(self: SecureSumClient, told: Any) -> Any:
        vector, unfit = honest(self, told)
        if self._number == LIAR:
            vector[:] = torch.randint(-(2**31), 2**31, vector.shape).int()
        return vector, unfit

    monkeypatch.setattr(SecureSumClient, "_mask", masked)
    with pytest.raises(TooFewClientsError, match=r"6 have helped to unmask .* and 0 are excluded"):
        trained()


def test_a_model_that_does_not_change_is_summed_once() -> None:
    # Nobody learns at a rate of 0: after a sum the model is the same, to the bit.
    with pytest.raises(TooFewClientsError, match="which has not changed since"):
        dure.train(
            small_task(lr=0.0),
            dure.FedAvg(clients=4, privacy="secure-aggregation"),
            stop=dure.Stop(rounds=3),
        )
