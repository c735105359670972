"""Which models can be cut where, and what is refused by name before any work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.errors import WorkerFailedError


class Tied(nn.Module):
    """The last layer has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.middle(self.first(inputs))))
        return result


class Looks(nn.Module):
    """The last layer looks at the examples again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(inputs)) + inputs)
        return result


class Draws(nn.Module):
    """Not the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.times = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.times += 1
        result: Tensor = self.last(self.first(inputs) * self.times)
        return result


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 3)
    )


def task_of(model: Callable[[], nn.Module] = plain, **others: Any) -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 4, generator=numbers)
    targets = torch.randint(0, 3, (24,), generator=numbers)
    given = {"loss": nn.functional.cross_entropy, "train": (inputs, targets), **others}
    return dure.Task(model=model, **given)


def train(task: dure.Task, strategy: dure.Strategy, **others: Any) -> dure.Run:
    return dure.train(task, strategy, dure.Simulated(**others), dure.Stop(rounds=1))


Split = partial(dure.SplitLearning, clients=2, batch_size=4)


@pytest.mark.parametrize(
    ("model", "strategy", "said"),
    [
        (plain, Split(cut=("nowhere",)), "nowhere"),
        (plain, Split(cut=("3",)), "cannot be cut after 3 layers: it has 3"),
        (plain, Split(cut=("0",)), "needs at least one"),
        (plain, Split(cut=("2", "1")), "is not after"),
        (plain, Split(cut=("2", "2")), "is not after"),
        (plain, Split(cut=("1", "2", "2")), "names 3 places"),
        (plain, Split(clients=0), "clients is 0"),
        (plain, Split(local_epochs=0), "local_epochs is 0"),
        (plain, Split(clients=25), "25"),
        (plain, Split(handover="pigeon"), "pigeon"),
        (plain, dure.SplitFed(clients=2, version=3), "version is 3"),
        (Tied, Split(), "used on both sides"),
        (Looks, Split(), "reads the examples"),
        (Draws, Split(), "cannot be cut"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    model: Callable[[], nn.Module], strategy: dure.Strategy, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        train(task_of(model), strategy)


def test_a_model_that_only_the_end_ties_can_be_cut_in_the_u_shape() -> None:
    # Both layers that share the weight are the client's.
    run = train(task_of(Tied), Split(cut=("1", "2")))
    assert run.summary["ended"] == "rounds"


def test_an_optimizer_that_looks_at_all_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        train(task_of(optimizer=torch.optim.LBFGS), Split())


def test_conditions_that_its_clients_do_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="does not support arrival: leave it out"):
        train(task_of(), Split(), arrival="window:0.5")


def test_clients_with_the_end_cannot_weigh_a_loss_that_counts_late() -> None:
    def late(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum"), targets.sum() + 1

    strategy = dure.ParallelSplit(cut=("1", "2"), clients=2, batch_size=4)
    with pytest.raises(ValueError, match="its count only when it is computed"):
        train(task_of(loss=late), strategy)
    # One after another there is nothing to weigh.
    train(task_of(loss=late), Split(cut=("1", "2")))


@pytest.mark.parametrize("cut", [("1",), ("1", "2")], ids="-".join)
def test_a_loss_that_is_not_finite_names_the_client(cut: tuple[str, ...]) -> None:
    inputs = torch.randn(24, 4)
    inputs[5] = torch.nan
    task = task_of(train=(inputs, torch.zeros(24, dtype=torch.int64)))
    with pytest.raises((WorkerFailedError, ArithmeticError, dure.errors.DureError), match="client"):
        train(task, Split(cut=cut))


STRATEGIES = [
    Split(),
    Split(cut=("1", "2"), handover="server"),
    dure.ParallelSplit(clients=3, batch_size=4),
    dure.SplitFed(clients=3, batch_size=4),
    dure.SplitFed(cut=("1", "2"), clients=3, batch_size=4, version=2),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.label)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    strategy: dure.Strategy, tmp_path: Any
) -> None:
    task = task_of(normed, optimizer=partial(torch.optim.Adam, lr=0.01))
    world = dure.Simulated(devices="lognormal:1")
    whole = dure.train(task, strategy, world, dure.Stop(rounds=4))
    dure.train(task, strategy, world, dure.Stop(rounds=2), out=tmp_path / "run", checkpoint_every=1)
    resumed = dure.resume(tmp_path / "run", stop=dure.Stop(rounds=4), task=task)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    ends = [run.history.steps[-1].numbers for run in (whole, resumed)]
    assert ends[0] == ends[1]
