"""Members told by their loss: not at all where there is nothing to tell, and well if overfitted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from seen_updates import model_of, recorded_of, zip_state
from torch import nn
from torch.nn import functional as F

import dure
from dure.federated.attacks.examine import Examination, Examiner
from dure.federated.attacks.membership import auc, losses, membership, tpr_at
from dure.federated.attacks.recording import read_updates


def noisy_task(n: int = 60) -> dure.Task:
    """Labels that follow from nothing: whoever knows them has seen them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * n, 20, generator=generator)
    targets = torch.randint(0, 2, (2 * n,), generator=generator)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    return dure.Task(
        model,
        F.cross_entropy,
        (inputs[:n], targets[:n]),
        (inputs[n:], targets[n:]),
        partial(torch.optim.SGD, lr=0.3),
    )


def test_a_model_that_never_saw_the_data_tells_nothing() -> None:
    task = noisy_task(400)
    assert task.test is not None
    model = model_of(task)
    state = zip_state(task)
    every = torch.arange(400)
    found = membership(
        losses(model, state, task.train, every), losses(model, state, task.test, every)
    )
    assert found.auc.low < 0.5 < found.auc.high
    assert found.auc.high - found.auc.low < 0.15
    assert found.found[0.1] < 0.2


def test_an_overfitted_model_tells_its_members(tmp_path: Path) -> None:
    task = noisy_task()
    strategy = dure.FedAvg(clients=3, local_epochs=5, batch_size=5)
    world = dure.Simulated(keep_updates=30)
    run = dure.train(task, strategy, world, dure.Stop(rounds=30), out=tmp_path)
    wanted = Examination(sums=(1, 3), attacks=("membership",))
    final = dict(run.model.state_dict())
    updates = [one for one in read_updates(tmp_path) if one.about.round == 29]
    rows = Examiner(task, 0, wanted, final).rows(updates)
    assert [row.attack for row in rows] == ["membership", "membership", "membership, global model"]
    one, _, whole = rows
    assert whole.figures["auc"].low > 0.7
    # The client's own model has its own examples by heart.
    assert one.figures["auc"].value > 0.8


def test_auc_counts_pairs_and_ties_half() -> None:
    members = torch.tensor([0.1, 0.2, 0.2, 0.9])
    others = torch.tensor([0.2, 0.5, 1.0])
    pairs = [(m < o) + 0.5 * (m == o) for m in members.tolist() for o in others.tolist()]
    assert auc(members, others) == pytest.approx(sum(pairs) / 12)
    assert auc(torch.zeros(3), torch.ones(2)) == 1
    assert auc(torch.zeros(3), torch.zeros(2)) == 0.5


def test_a_threshold_accuses_no_more_than_its_share() -> None:
    others = torch.arange(100).double()
    assert tpr_at(torch.tensor([0.5, 4.5, 9.5, 50.0]), others, 0.05) == 0.5
    assert tpr_at(torch.tensor([-1.0]), others, 0.0) == 1
    # Ties at the threshold are not accused.
    assert tpr_at(torch.zeros(4), torch.zeros(10), 0.1) == 0


def test_a_task_without_test_data_has_no_others() -> None:
    plain = noisy_task()
    task = dure.Task(plain.model, plain.loss, plain.train)
    wanted = Examination(sums=(1,), attacks=("membership",))
    rows = Examiner(task, 0, wanted).rows(recorded_of(task, [[0, 1], [2, 3]]))
    assert all(
        row.why == "the task has no test data, with which training examples are compared"
        for row in rows
    )
    with pytest.raises(ValueError, match="give both"):
        membership(torch.zeros(0), torch.zeros(1))
