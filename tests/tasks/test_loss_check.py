"""What is said of a loss before training, by every system."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from small import examples, network, small_task


def own(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


class Own(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) + 0.0


def ignoring(target: int = -100) -> dure.Examples:
    given = examples(12)
    targets = given.targets.clone()
    targets[0] = target
    return dure.Examples(given.inputs, targets, keys=given.keys)


def said(strategy: Any = None, world: Any = None, **changes: Any) -> list[str]:
    """What a run of one step warns of."""
    task = small_task(**{"train": ignoring(), "test": None, **changes})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unit = "step" if strategy is None else strategy.traits.unit
        stop = dure.Stop(steps=1) if unit == "step" else dure.Stop(rounds=1)
        dure.train(task, strategy or dure.SingleWorker(), world, stop)
    assert all(one.filename == __file__ for one in caught), "it is about the user's line"
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(), None),
        (dure.DataParallel(), dure.Threads(2)),
        (dure.LocalSGD(), dure.Processes(2)),
        (dure.FedAvg(clients=2), dure.Simulated(engine="loop")),
    ],
    ids=lambda one: getattr(one, "name", "default"),
)
def test_every_system_warns_once_of_targets_that_a_loss_of_ones_own_may_ignore(
    strategy: Any, world: Any
) -> None:
    (one,) = said(strategy, world, loss=own)
    assert one.startswith("targets contain -100, which the loss own may ignore")
    assert "return (sum, count)" in one
    assert "\n" not in one


def test_the_ignored_target_is_the_losss_own() -> None:
    (one,) = said(loss=Own(ignore_index=1), train=ignoring(1))
    assert one.startswith("targets contain 1, which the loss Own may ignore")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": pair},
        {"loss": F.cross_entropy},
        {"loss": nn.CrossEntropyLoss()},
        {"loss": own, "train": examples(12)},
        {
            "loss": lambda outputs, targets: F.mse_loss(outputs[:, :1], targets),
            "train": (examples(12).inputs, torch.full((12, 1), -100.0)),
            "model": network,
        },
    ],
    ids=["pair", "function", "module", "nothing ignored", "numbers"],
)
def test_where_nothing_is_in_doubt_nothing_is_said(changes: dict[str, Any]) -> None:
    assert said(**changes) == []


def test_targets_in_structures_test_data_and_datasets_are_looked_at() -> None:
    def of_labels(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return own(outputs, targets["labels"])

    given = ignoring()
    structured = dure.Examples(given.inputs, {"labels": given.targets})
    assert len(said(loss=of_labels, train=structured)) == 1
    assert len(said(loss=own, train=examples(12), test=ignoring())) == 1
    items = list(zip(given.inputs, given.targets.tolist(), strict=True))
    assert len(said(loss=own, train=items)) == 1


def test_asking_the_loss_draws_no_number_and_changes_no_model() -> None:
    made = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3).double()
            self.calls = 0
            made.append(self)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            torch.rand(1)
            outputs: Tensor = self.layer(x)
            return outputs

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    said(loss=pair, model=Counting)
    assert torch.equal(torch.random.get_rng_state(), before)
    one = dure.train(
        small_task(train=ignoring(), test=None, loss=pair, model=Counting),
        dure.SingleWorker(),
        stop=dure.Stop(steps=2),
    )
    other = dure.train(
        small_task(train=ignoring(), test=None, loss=F.cross_entropy, model=Counting),
        dure.SingleWorker(),
        stop=dure.Stop(steps=2),
    )
    assert one.model.calls == other.model.calls


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("strategy", [dure.SingleWorker(), dure.FedAvg(clients=2)])
def test_a_loss_of_torchs_that_is_no_mean_is_refused_before_any_work(
    reduction: str, strategy: Any
) -> None:
    def never() -> nn.Module:
        raise AssertionError("a model was made")

    for loss in (
        nn.CrossEntropyLoss(reduction=reduction),
        partial(F.cross_entropy, reduction=reduction),
    ):
        task = small_task(loss=loss, model=never)
        with pytest.raises(
            ValueError, match=f"has the reduction '{reduction}', but a loss has to be the"
        ):
            dure.train(task, strategy)
