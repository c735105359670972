"""Data keep their dtype, unless the task says in which one its inputs are to be."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dure
from dure.contracts.fresh_model import examples_for
from dure.data.datasets import DatasetExamples
from dure.data.streams import StreamExamples
from small import CLASSES, FEATURES, network, small_task

LR = 0.3


class Mixed(nn.Module):
    """Parameters of three dtypes, the coarsest first; it casts where it has to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.first = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, 1).double()

    def forward(self, inputs: Tensor) -> Tensor:
        # What is lost by rounding the inputs is all that is left of them.
        near = (inputs - 1000).float()
        scores: Tensor = self.head((self.first(near).tanh() * self.table.float()).double())
        return scores.squeeze(1)


def fine(n: int = 24) -> tuple[Tensor, Tensor]:
    """Inputs and targets of whose digits float32 keeps few, and bfloat16 none."""
    draws = torch.Generator().manual_seed(0)
    inputs = 1000 + 1e-4 * torch.randn(n, FEATURES, generator=draws, dtype=torch.float64)
    return inputs, 1e6 + torch.rand(n, generator=draws, dtype=torch.float64)


def near_a_million(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets - 1e6)


def plain(steps: int) -> nn.Module:
    """A loop of plain PyTorch."""
    inputs, targets = fine()
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        near_a_million(model(inputs), targets).backward()
        optimizer.step()
    return model


def fine_task(**changes: Any) -> dure.Task:
    settings: dict[str, Any] = {
        "model": Mixed,
        "loss": near_a_million,
        "train": fine(),
        "test": fine(),
        "optimizer": partial(torch.optim.SGD, lr=LR),
        **changes,
    }
    return dure.Task(**settings)


SYSTEMS: dict[str, tuple[Any, Any, Any]] = {
    "single worker": (dure.SingleWorker(None), None, dure.Stop(steps=3)),
    "threads": (dure.DataParallel(None), dure.Threads(2), dure.Stop(steps=3)),
    "local SGD": (dure.LocalSGD(None, period=3), dure.Processes(1), dure.Stop(rounds=1)),
    "ZeRO": (dure.ZeRO(1, None), dure.Processes(1), dure.Stop(steps=3)),
    "parameter server": (
        dure.ParameterServer(workers=1, batch_size=24),
        dure.Simulated(),
        dure.Stop(rounds=3),
    ),
    "a client, loop": (
        dure.FedAvg(clients=1, local_steps=3, batch_size=None),
        dure.Simulated(engine="loop"),
        dure.Stop(rounds=1),
    ),
    "a client, auto": (
        dure.FedAvg(clients=1, local_steps=3, batch_size=None),
        dure.Simulated(),
        dure.Stop(rounds=1),
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_trains_on_the_data_as_a_plain_loop_does(system: str) -> None:
    strategy, world, stop = SYSTEMS[system]
    run = dure.train(fine_task(), strategy, *([world] if world else []), stop=stop)
    exact = plain(3)
    pairs = zip(run.model.state_dict().items(), exact.state_dict().values(), strict=True)
    for (name, mine), other in pairs:
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5, msg=name)
    with torch.no_grad():
        right = float(near_a_million(exact(fine()[0]), fine()[1]))
    assert run.summary["test_loss"] == pytest.approx(right, rel=1e-5)


def kinds_of(task: dure.Task) -> list[torch.dtype]:
    """Return the dtypes of inputs and targets, of training and of test data."""
    train, test = examples_for(task)
    assert test is not None
    pairs = [train.batch(torch.arange(2)), test.batch(torch.arange(2))]
    return [leaf.dtype for pair in pairs for leaf in pair]


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(8, FEATURES).to(dtype), torch.randn(8, CLASSES).to(dtype)


FORMS: dict[str, Any] = {
    "tensors": lambda pair: pair,
    "arrays": lambda pair: tuple(map(Tensor.numpy, pair)),
    "dataset": lambda pair: DatasetExamples(TensorDataset(*pair)),
    "stream": lambda pair: StreamExamples(_Stream(TensorDataset(*pair)), 8),
}


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return (self.items[at] for at in range(len(self.items)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_inputs_are_cast_as_the_task_asks_and_targets_never(
    form: str, given: torch.dtype, asked: torch.dtype | None
) -> None:
    data = FORMS[form](numbers(given))
    task = small_task(loss=F.mse_loss, train=data, test=data, metrics={}, dtype=asked)
    assert kinds_of(task) == [asked or given, given] * 2


def test_labels_of_a_model_s_own_loss_are_no_inputs() -> None:
    columns = {"values": torch.randn(4, 2), "labels": torch.randn(4), "mask": torch.ones(4).long()}
    cast = dure.Examples(columns, columns["labels"]).to(torch.float64)
    assert {name: one.dtype for name, one in cast.inputs.items()} == {
        "values": torch.float64,
        "labels": torch.float32,
        "mask": torch.int64,
    }


@pytest.mark.parametrize("dtype", ["float32", torch.int64, 32])
def test_a_dtype_that_inputs_cannot_have_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"floating-point dtype, such as torch\.float32"):
        small_task(dtype=dtype)


SINGLE = (dure.SingleWorker(batch_size=None), dure.FedAvg(clients=2, batch_size=None))


@pytest.mark.parametrize("system", SINGLE, ids=lambda system: system.name)
def test_inputs_that_the_model_does_not_take_are_refused_with_the_remedy(
    system: Any, tmp_path: Any
) -> None:
    task = small_task(model=partial(network, torch.float32))
    with pytest.raises(
        ValueError,
        match=r"training inputs are torch.float64 and the model is torch.float32.*"
        r"Task\(dtype=torch.float32\)",
    ):
        dure.train(task, system, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    remedied = small_task(model=partial(network, torch.float32), dtype=torch.float32)
    assert dure.train(remedied, system, stop=dure.Stop(epochs=1)).history.steps


def test_an_array_of_numpy_is_as_the_user_has_made_it() -> None:
    inputs, targets = numpy.random.default_rng(0).normal(size=(8, FEATURES)), torch.arange(8) % 3
    with pytest.raises(ValueError, match=r"inputs are torch\.float64"):
        dure.train(
            small_task(model=partial(network, torch.float32), train=(inputs, targets), test=None),
            dure.SingleWorker(),
            stop=dure.Stop(epochs=1),
        )


def test_targets_that_the_loss_does_not_take_are_refused_with_the_remedy() -> None:
    inputs, targets = numbers(torch.float32)
    task = small_task(
        model=partial(network, torch.float32),
        loss=F.huber_loss,
        train=(inputs, targets.double()),
        test=None,
    )
    with pytest.raises(ValueError, match=r"targets are torch\.float64 and the model's outputs"):
        dure.train(task, dure.SingleWorker(), stop=dure.Stop(epochs=1))


def test_two_dtypes_that_go_together_are_no_error() -> None:
    inputs, targets = numbers(torch.float32)
    task = small_task(
        model=partial(network, torch.float32),
        loss=F.mse_loss,
        train=(inputs, targets.double()),
        test=(inputs, targets),
        metrics={},
    )
    assert dure.train(task, dure.SingleWorker(), stop=dure.Stop(epochs=1)).history.steps
