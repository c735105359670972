"""Clients that err, lie, or answer too late: refused with a reason, and never a harm to others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deployed import Deployment, Plan
from scripted import Scripted

import dure

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
    "said", [{"samples": 2**70}, {"examples": 2**70}, {"counted": 1e300}, {"samples": -1}]
)
def test_an_update_that_claims_what_cannot_be(said: dict[str, float], served: Deployment) -> None:
    with Scripted(served.url, 0) as good, Scripted(served.url, 1) as wrong:
        train = wrong.work()
        try:
            wrong.send(*wrong.update(train, **said))
        except dure.errors.DureError:
            wrong.send(*wrong.update(train, samples=0))
        goes_on(served, good, wrong)


def test_an_update_that_comes_twice_at_once_counts_once(served: Deployment) -> None:
    with Scripted(served.url, 0) as good, Scripted(served.url, 1) as twice:
        train = twice.work()
        reserve, tensors = twice.update(train)
        assert twice.send(reserve, tensors)
        assert twice.send(reserve, tensors)
        good.answer(good.work())
        good.answer(good.work())
        twice.answer(twice.work())
        assert served.ended().facts["outcomes"] == {"accepted": 4}
        assert all(one.kept for one in twice.outcomes)
