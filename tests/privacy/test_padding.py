"""Rows of padding get no noise, where no example has a gradient there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.privacy.padding import PaddingRow, padding_rows


class Bag(nn.Module):
    """A sum of embeddings; tied: the table is used once more, where no module tells."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6, padding_idx=3)
        self.head = nn.Linear(6, 12 if tied else 2)
        self.tied = tied

    def forward(self, words: Tensor) -> Tensor:
        values = self.table(words).sum(1)
        return F.linear(values, self.table.weight) if self.tied else self.head(values)


def task_of(tied: bool = False, **changes: Any) -> dure.Task:
    draws = torch.Generator().manual_seed(0)
    words = torch.randint(0, 12, (40, 5), generator=draws)
    settings: dict[str, Any] = {
        "model": partial(Bag, tied),
        "loss": F.cross_entropy,
        "train": (words, torch.arange(40) % 2),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        **changes,
    }
    return dure.Task(**settings)


SYSTEMS = {
    "dp-sgd": (dure.SingleWorker(8, privacy="dp-sgd:1:1:seed"), dure.Stop(steps=4)),
    "clients' dp-sgd": (dure.FedAvg(clients=4, privacy="dp-sgd:1:1"), dure.Stop(rounds=2)),
    "user-level": (dure.FedAvg(clients=4, privacy="user-level:1:1"), dure.Stop(rounds=2)),
    "scaffold": (dure.Scaffold(clients=4, privacy="user-level:1:1"), dure.Stop(rounds=2)),
    "local": (dure.FedAvg(clients=4, privacy="user-level:1:1:local"), dure.Stop(rounds=2)),
    "distributed": (
        dure.FedAvg(clients=4, privacy="secure-aggregation/user-level:1:1:distributed"),
        dure.Stop(rounds=2),
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_a_model_says_does_not_depend_on_how_long_the_padding_is(system: str) -> None:
    strategy, stop = SYSTEMS[system]
    task = task_of()
    before = seeded_model(task, 0)
    run = dure.train(task, strategy, stop=stop)
    table = run.model.table.weight  # type: ignore[union-attr]
    assert not bool(table[3].any())  # type: ignore[index]
    # All other rows have noise.
    assert bool((table != before.table.weight).any(1).sum() == 11)  # type: ignore[union-attr]


def test_a_row_that_has_gradients_in_another_place_gets_noise() -> None:
    task = task_of(tied=True)
    assert padding_rows(task, seeded_model(task, 0)) == []
    run = dure.train(task, SYSTEMS["dp-sgd"][0], stop=dure.Stop(steps=2))
    assert bool(run.model.table.weight[3].any())  # type: ignore[union-attr, index]


def test_a_server_without_data_knows_the_row_by_its_layer() -> None:
    task = task_of(train=None)
    assert padding_rows(task, seeded_model(task, 0)) == [PaddingRow("table.weight", 3)]


def test_a_frozen_table_and_one_of_two_layers_have_no_such_row() -> None:
    task = task_of()
    model = Bag()
    model.table.weight.requires_grad_(False)
    assert padding_rows(task, model) == []
    shared = Bag()
    shared.other = nn.Embedding(12, 6)
    shared.other.weight = shared.table.weight
    assert padding_rows(task, shared) == []
