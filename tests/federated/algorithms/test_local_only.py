"""Clients of local-only are those that train alone, and nothing of them travels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dure


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def task(model: Callable[[], nn.Module] = network) -> dure.Task:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(36, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (36,), generator=generator)
    data = (inputs, targets)
    return dure.Task(
        model, F.cross_entropy, data, data, optimizer=partial(torch.optim.SGD, lr=0.05)
    )


ALONE = dure.LocalOnly(clients=3, batch_size=None, local_steps=4, held_out=0.0)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_mean_of_its_clients_is_that_of_single_workers_and_nothing_travels(
    engine: Literal["loop", "batched"],
) -> None:
    run = dure.train(task(), ALONE, dure.Simulated(engine=engine), stop=dure.Stop(rounds=3))
    parts = dure.IID().divide(3, task().train, seed=0)
    models = [
        dure.train(
            dure.Task(
                network,
                F.cross_entropy,
                task().train.batch(part),
                None,
                optimizer=partial(torch.optim.SGD, lr=0.05),
            ),
            dure.SingleWorker(None),
            stop=dure.Stop(steps=12),
        ).model
        for part in parts
    ]
    for mine, *theirs in zip(
        run.model.parameters(), *(m.parameters() for m in models), strict=True
    ):
        assert torch.allclose(
            mine, torch.stack([one.detach() for one in theirs]).mean(0), atol=1e-12
        )
    assert run.summary["bytes_sent"] == 0


def test_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    strategy = dure.LocalOnly(clients=3, batch_size=4, fraction=0.67, held_out=0.25)
    whole = dure.train(task(), strategy, stop=dure.Stop(rounds=4))
    dure.train(task(), strategy, stop=dure.Stop(rounds=2), out=tmp_path / "run")
    resumed = dure.resume(
        tmp_path / "run", task=task(), strategy=strategy, stop=dure.Stop(rounds=4)
    )
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("strategy", "model", "says"),
    [
        (dure.LocalOnly(aggregate="median"), network, "leave aggregate"),  # type: ignore[arg-type]
        (dure.LocalOnly(privacy="dp-sgd:1:1"), network, "leave privacy"),  # type: ignore[arg-type]
        (dure.LocalOnly(clients=3), normed, "buffers, such as 1.running_mean, are averaged"),
    ],
)
def test_what_it_cannot_do_is_refused(
    strategy: dure.LocalOnly, model: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        dure.train(task(model), strategy, stop=dure.Stop(rounds=1))


def test_attacks_on_what_nobody_sends_are_refused() -> None:
    world = dure.Simulated(attack="sign-flip", attackers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"send nothing that sign-flip:1\.0 could"):
        dure.train(task(), dure.LocalOnly(clients=3), world, dure.Stop(rounds=1))
