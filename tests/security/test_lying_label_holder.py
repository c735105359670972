"""A holder of the labels that lies: what a party checks, and how often it measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.errors import PolicyError
from dure.split.gradient_bound import ReceivedError
from dure.split.network.control import Evaluate, Evaluated, Hello, Resume, Resumed
from dure.split.network.parties_site import PartySite
from dure.split.network.site import SiteLimits
from dure.split.parties.messages import ActivationGradients, Activations, BeginStep

COLUMNS = [[0, 1], [2, 3]]


def model() -> nn.Module:
    return dure.VerticalModel(
        [nn.Linear(2, 5) for _ in COLUMNS], nn.Linear(10, 3), "concat", COLUMNS
    ).double()


def examples(people: int) -> dure.Examples:
    inputs = torch.randn(people, 4, generator=torch.Generator().manual_seed(0)).double()
    return dure.Examples(inputs, inputs[:, :3].argmax(1))


def party(limits: SiteLimits) -> PartySite:
    task = dure.Task(model, F.cross_entropy, examples(20), examples(9))
    plan = dure.VerticalSplit(batch_size=4).plan
    one = seeded_model(task, 0).train()
    train, test = examples_for(task)
    site = PartySite(task, one, train, test, plan, 0, 0, None, "run", lambda what, about: None)
    identity: Any = None
    site.takes(Hello(20, b"", ""), identity, limits)
    assert site._hears(Resume(1, 0)) == [Resumed(1)]
    return site


def test_gradients_beyond_the_bound_of_the_site_are_refused() -> None:
    site = party(SiteLimits(largest_gradient=1.0))
    (activations,) = site._hears(BeginStep(0))
    assert isinstance(activations, Activations)
    for size in (float("inf"), 1.0):
        before = site.part.kept()["values"]
        with pytest.raises(ReceivedError, match="server sends gradients"):
            site._hears(ActivationGradients(0, torch.full_like(activations.values, size)))
        after = site.part.kept()["values"]
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert site._hears(ActivationGradients(0, torch.zeros_like(activations.values))) == []


def test_a_model_is_measured_as_often_as_the_site_allows() -> None:
    asked: list[int] = []

    def refusal(round: int, examples: int) -> str:
        asked.append(examples)
        return "" if len(asked) < 3 else "policy.toml allows 2 evaluations of a round"

    site = party(SiteLimits(refusal=refusal))
    for _ in range(2):
        # In several pieces it is one measurement.
        for first, count in ((0, 4), (4, 5)):
            (values,) = site._hears(Evaluate(first, count))
            assert isinstance(values, Evaluated)
    assert len(asked) == 2
    # Also rows out of order are one more.
    with pytest.raises(PolicyError, match="party 0 does not evaluate the model: policy"):
        site._hears(Evaluate(4, 5))
