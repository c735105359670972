"""Clients that err, lie, or answer too late: refused with a reason, and never a harm to others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed import Deployment, Plan
from fuzzed import DIGEST, STREAM, TICKET, Target
from scripted import Scripted
from torch import nn

import dure
from dure.deploy.client.link import NotTrustedError, RefusedError
from dure.deploy.server.register import FILE, Register
from dure.run.join import join
from dure.wire.certificates import issue_client, make_authority
from small import diverging_task, network, small_task

TWO = Plan(dure.FedAvg(clients=2, batch_size=4), rounds=2)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path, TWO, tls=False) as deployment:
        deployment.serve()
        yield deployment


def goes_on(served: Deployment, good: Scripted, wrong: Scripted) -> str:
    """The first round ends without the wrong update, and the second with both; why it was
    refused."""
    good.answer(good.work())
    again = wrong.work()
    assert again.round == 1
    good.answer(good.work())
    wrong.answer(again)
    good.hears_the_end()
    wrong.hears_the_end()
    ended = served.ended()
    assert ended.summary["steps"] == 2
    [outcome] = [one for one in wrong.outcomes if not one.kept]
    return outcome.reason


def test_an_update_of_the_right_length_that_is_no_tensors(served: Deployment) -> None:
    with Scripted(served.url, 0) as good, Scripted(served.url, 1) as wrong:
        train = wrong.work()
        _, tensors = wrong.update(train)
        # Of other names, and so of other tensors.
        other = {name[::-1]: one for name, one in tensors.items()}
        assert wrong.send(wrong.reserve(train, other), other)
        assert "model" in goes_on(served, good, wrong)


def test_an_update_that_is_not_finite(served: Deployment) -> None:
    with Scripted(served.url, 0) as good, Scripted(served.url, 1) as wrong:
        train = wrong.work()
        _, tensors = wrong.update(train)
        next(iter(tensors.values()))[0] = torch.nan
        assert wrong.send(wrong.reserve(train, tensors), tensors)
        assert goes_on(served, good, wrong) == "it is not finite"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"examples": 6}, "of 6 examples, but its client has 5"),
        ({"examples": 0}, "the update is of 0 examples"),
        ({"examples": 2**53}, "but its client has 5"),
        # Two steps of a pass, of which none can be of more than all examples.
        ({"samples": 11}, "11 samples, and of 5 examples 10 are asked for at most"),
        ({"samples": 2**53}, "are asked for at most"),
        ({"samples": 0}, "processed 0 samples"),
        ({"samples": 2**70}, "not a valid UploadRequest"),
        ({"samples": -1}, "not a valid UploadRequest"),
        ({"examples": 2**70}, "not a valid UploadRequest"),
    ],
)
def test_an_update_of_more_than_was_asked_for_is_refused_and_changes_nothing(
    said: dict[str, int], told: str, target: Target
) -> None:
    body = {**UPDATE, **said}
    before, counted = target.state(), refusals(target)
    status, answer = target.said("client", "/v1/uploads", body)
    assert status in (400, 422)
    assert told in answer.decode()
    assert target.state() == before
    # Of these, so many make a quarantine.
    assert refusals(target) == counted + 1
    assert target.said("client", "/v1/uploads", UPDATE)[0] == 200


UPDATE = {
    "ticket": TICKET,
    "bytes": len(STREAM),
    "digest": DIGEST,
    "examples": 5,
    "samples": 10,
    "loss": 1.0,
}


def refusals(target: Target) -> int:
    return sum(target.access.status()["refusals"].values())


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with Target(tmp_path) as target:
        yield target


@pytest.mark.parametrize("examples", [-1, 2**53 + 1, 2**70, 1.5, "5", None])
def test_so_many_examples_nobody_has(examples: object, target: Target) -> None:
    said = {"version": 1, "name": "other", "examples": examples}
    before = target.state()
    assert target.said("other", "/v1/check-in", said)[0] == 400
    assert target.state() == before


def test_a_loss_that_counts_what_cannot_be_does_not_count(served: Deployment) -> None:
    with Scripted(served.url, 0) as good, Scripted(served.url, 1) as wrong:
        wrong.send(*wrong.update(wrong.work(), counted=1e300))
        assert "counts more than its examples have" in goes_on(served, good, wrong)


def test_a_player_that_was_refused_for_what_it_said_may_say_it_right(served: Deployment) -> None:
    with Scripted(served.url, 0) as good, Scripted(served.url, 1) as wrong:
        train = wrong.work()
        with pytest.raises(
            RefusedError, match="the update is invalid: it has processed 1,000 samples"
        ):
            wrong.send(*wrong.update(train, samples=1000))
        wrong.answer(train)
        good.answer(good.work())
        for player in (good, wrong):
            player.answer(player.work())
        for player in (good, wrong):
            player.hears_the_end()
        assert served.ended().facts["outcomes"] == {"accepted": 4}


def test_an_update_that_comes_twice_at_once_counts_once(served: Deployment) -> None:
    with Scripted(served.url, 0) as good, Scripted(served.url, 1) as twice:
        train = twice.work()
        reserve, tensors = twice.update(train)
        assert twice.send(reserve, tensors)
        assert twice.send(reserve, tensors)
        good.answer(good.work())
        good.answer(good.work())
        twice.answer(twice.work())
        good.hears_the_end()
        twice.hears_the_end()
        assert served.ended().facts["outcomes"] == {"accepted": 4}
        assert all(one.kept for one in twice.outcomes)


def test_a_client_that_answers_a_round_that_is_over_hears_so(tmp_path: Path) -> None:
    plan = Plan(TWO.strategy, rounds=2, options={"deadline": 3.0})
    with Deployment(tmp_path, plan, tls=False) as deployment:
        deployment.serve()
        with Scripted(deployment.url, 0) as good, Scripted(deployment.url, 1) as late:
            train = late.work()
            reserve, tensors = late.update(train)
            good.answer(good.work())
            assert good.work().round == 1, "the deadline has passed"
            with pytest.raises(RefusedError, match="this update is not needed any more"):
                late.send(reserve, tensors)
            late.answer(late.work())


# What is refused before anything is done


def wide() -> nn.Module:
    return nn.Sequential(*network(), nn.Linear(3, 3).double())


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": wide}, "5.weight"),
        ({"loss": nn.MSELoss()}, "MSELoss"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.9)}, "lr=0.9"),
        ({"optimizer": torch.optim.Adam}, "Adam"),
    ],
)
def test_a_client_of_another_task_hears_in_what_it_differs(
    other: dict[str, Any], reason: str, served: Deployment
) -> None:
    with pytest.raises(RefusedError) as refused:
        join(served.url, small_task(**other), name="other", part=0)
    assert reason in str(refused.value)
    assert "the client's task differs" in str(refused.value)


def test_two_clients_of_one_name(served: Deployment) -> None:
    with Scripted(served.url, 0):
        with pytest.raises(RefusedError, match="is called 'player 0' already"):
            Scripted(served.url, 1, name="player 0")
        with pytest.raises(RefusedError, match="the number 0 is taken"):
            Scripted(served.url, 0, name="another")
        Scripted(served.url, 1).__exit__(None, None, None)


def test_a_client_that_is_revoked_is_told_so_and_its_place_is_filled(tmp_path: Path) -> None:
    plan = Plan(dure.FedAvg(clients=3, fraction=0.7, batch_size=4), rounds=2)
    with Deployment(tmp_path, plan, tls=False) as deployment:
        deployment.serve()
        players = [Scripted(deployment.url, number) for number in range(3)]
        revoked = next(one for one in players if one.welcome.client == 0)
        with Register(deployment.run / FILE) as register:
            register.revoke("0")
        with pytest.raises(RefusedError, match="revoked"):
            revoked.work()
        for _ in range(2):
            for player in players[1:]:
                player.answer(player.work())
        for player in players[1:]:
            player.hears_the_end()
        assert deployment.ended().summary["steps"] == 2
        for player in players:
            player.__exit__(None, None, None)


def test_invited_clients_alone_take_part(tmp_path: Path) -> None:
    plan = Plan(dure.FedAvg(clients=1, batch_size=4), rounds=1, options={"access": "invited"})
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        ask = partial(join, deployment.url, small_task(), part=0, authority=deployment.authority)
        with pytest.raises(RefusedError, match="enrol with the token"):
            ask(name="uninvited")
        with pytest.raises(RefusedError, match="not one of this server's invitations"):
            ask(name="guesses", token="made up")
        with Register(deployment.run / FILE) as register:
            token = register.invite()
        assert ask(name="invited", token=token) == "the run is over"
        assert deployment.ended().summary["steps"] == 1


def test_certificates_of_others(tmp_path: Path) -> None:
    clients, others = tmp_path / "clients", tmp_path / "others"
    clients_authority = make_authority(clients).certificate
    mine = issue_client(clients, "site").certificate
    expired = issue_client(clients, "old", days=1e-9).certificate
    unknown_authority = make_authority(others).certificate
    forged = issue_client(others, "site").certificate
    plan = Plan(
        dure.FedAvg(clients=1, batch_size=4),
        rounds=1,
        options={"client_ca": str(clients_authority)},
    )
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        ask = partial(join, deployment.url, small_task(), part=0, name="site")
        with pytest.raises(NotTrustedError, match="is not trusted"):
            ask(authority=unknown_authority, certificate=mine)
        with pytest.raises(ValueError, match="expired"):
            ask(authority=deployment.authority, certificate=expired)
        # The server closes connections and says no more.
        for certificate in (None, forged):
            with pytest.raises(
                NotTrustedError, match="does the server require a client certificate"
            ):
                ask(authority=deployment.authority, certificate=certificate)
        assert ask(authority=deployment.authority, certificate=mine) == "the run is over"


# A site's own code


class Fussy(nn.Module):
    """Raises in the third step of training, with a secret."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps == 3:
            raise LookupError("no patient called Miller")
        return self.inner(inputs)


def fussy_task() -> dure.Task:
    return small_task(model=Fussy)


def test_what_a_client_raises_is_told_without_its_message(tmp_path: Path) -> None:
    plan = Plan(dure.FedAvg(clients=2, batch_size=4), rounds=2, task=fussy_task)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(2)
        ended = deployment.ended()
        told = repr(ended.summary)
        assert "LookupError" in told
        assert "test_wrong_clients.py" in told
        assert "Miller" not in told
        assert "Miller" in repr(deployment.clients[0].said("failed"))


def test_a_client_whose_training_is_not_finite_is_told_and_goes_on(tmp_path: Path) -> None:
    plan = Plan(dure.FedAvg(clients=2, batch_size=4), rounds=2, task=diverging_task)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(2)
        settled = deployment.clients[0].wait_for("settled")
        assert not settled["kept"]
        assert "finite" in settled["reason"]
