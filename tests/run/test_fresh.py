"""The task's factory is called once in a process, with the same bits as if it were called again."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.run.compare import compare
from dure.run.run_model import RunModel
from dure.tensors.copies import copy_of
from small import CLASSES, FEATURES, same_bits, small_task

SYSTEMS: list[tuple[Any, Any, dure.Stop]] = [
    (dure.SingleWorker(8), None, dure.Stop(steps=2)),
    (dure.DataParallel(8), dure.Threads(2), dure.Stop(steps=2)),
    (dure.Hogwild(8), dure.Threads(2), dure.Stop(rounds=1)),
    (dure.LayersPerCore(8, 2), dure.Threads(2), dure.Stop(steps=2)),
    (dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=2)),
    (dure.ZeRO(batch_size=8), dure.Processes(2), dure.Stop(steps=2)),
    (dure.Pipeline(8, 2), dure.Processes(2), dure.Stop(steps=2)),
    (dure.ADMM(8), dure.Processes(2), dure.Stop(rounds=1)),
    (dure.ParallelSGD(8), dure.Processes(2), dure.Stop(rounds=1)),
    (dure.FedAvg(clients=3), dure.Simulated(engine="loop"), dure.Stop(rounds=2)),
    (dure.FedAvg(clients=3), dure.Simulated(engine="batched"), dure.Stop(rounds=2)),
    (dure.Ditto(clients=3, held_out=0.3), dure.Simulated(engine="loop"), dure.Stop(rounds=2)),
    (dure.FedPer(clients=3, held_out=0.3), dure.Simulated(engine="loop"), dure.Stop(rounds=2)),
]


def noted(path: Path, model: Callable[[], nn.Module]) -> nn.Module:
    """The model, with a line in a file for the process that asked for it."""
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return model()


def calls(path: Path) -> list[int]:
    """How often each process asked."""
    pids = path.read_text().split()
    return [pids.count(pid) for pid in sorted(set(pids))]


@pytest.mark.parametrize(
    ("strategy", "world", "stop"), SYSTEMS, ids=[strategy.label for strategy, _, _ in SYSTEMS]
)
def test_the_factory_is_called_once_in_a_process(
    tmp_path: Path, strategy: Any, world: Any, stop: dure.Stop
) -> None:
    task = small_task()
    counted = replace(task, model=partial(noted, tmp_path / "calls", task.model))
    run = dure.train(counted, strategy, world, stop)
    assert set(calls(tmp_path / "calls")) == {1}
    other = dure.train(replace(task, model=uncopied(task.model)), strategy, world, stop)
    if strategy.run_traits.deterministic:
        for mine, theirs in zip(run.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def uncopied(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A factory of models that have no copy, so that it is called for each."""

    def made() -> nn.Module:
        model = factory()
        model.forward_again = lambda inputs: model(inputs)
        assert copy_of(model) is None
        return model

    return made


def test_a_comparison_makes_one_model_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    task = small_task()
    counted = replace(task, model=partial(noted, tmp_path / "calls", task.model))
    systems = [
        *(dure.SingleWorker(8), dure.FedAvg(clients=3), dure.Scaffold(clients=3)),
        *((dure.LayersPerCore(8, 2), dure.Threads(2)), (dure.Pipeline(8, 2), dure.Processes(1))),
        dure.SingleWorker(8),
    ]
    done = compare(counted, systems, stop=dure.Stop(epochs=1))
    assert not done.failed
    assert calls(tmp_path / "calls") == [1]
    first, last = done.runs[0].model, done.runs[-1].model
    for mine, theirs in zip(first.parameters(), last.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine is not theirs


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES).double()
        self.second = nn.Linear(FEATURES, FEATURES).double()
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, CLASSES).double()
        self.register_buffer("mask", torch.ones(FEATURES).double(), persistent=False)
        self.last.weight.decays = False

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.second(self.first(inputs) * self.mask))
        return scores


def test_what_the_user_gets_has_the_models_ties_buffers_and_marks() -> None:
    run = dure.train(small_task(model=Tied), dure.SingleWorker(8), stop=dure.Stop(steps=2))
    model = run.model
    assert model.first.weight is model.second.weight
    assert torch.equal(model.mask, torch.ones(FEATURES).double())
    assert model.last.weight.decays is False
    assert not any(
        hasattr(parameter, "_backward_hooks") and parameter.grad is not None
        for parameter in model.parameters()
    )


def test_a_taken_model_leaves_a_shell_that_takes_no_memory() -> None:
    task = small_task()
    fresh = RunModel(task, 3, seeded_model(task, 3))
    taken = fresh.take()
    shell = fresh._shell
    assert shell is not None
    assert all(weight.untyped_storage().nbytes() == 0 for weight in shell._model.parameters())
    with torch.no_grad():
        for weight in taken.parameters():
            weight += 1
    again = fresh.trained(taken.state_dict(), {})
    for mine, theirs in zip(again.parameters(), taken.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


class Adapted(nn.Module):
    """Saves and loads what it has learned, and not the frozen layer below."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.frozen(inputs).relu())

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        whole = super().state_dict(*args, **options)
        return {name: value for name, value in whole.items() if not name.startswith("frozen")}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False, assign=assign)


def test_a_model_that_saves_a_part_of_itself_is_whole_in_the_end() -> None:
    task = small_task(model=lambda: Adapted().double())
    run = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=3), seed=5)
    assert torch.equal(run.model.frozen.weight, seeded_model(task, 5).frozen.weight)


def test_the_model_takes_no_memory_here_while_it_is_trained_elsewhere() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    fresh = RunModel(small_task(), 0, model)
    fresh.rest()
    assert model.weight.untyped_storage().nbytes() > 0  # the user's own, who may look at it
    trained = fresh.trained(
        {"weight": torch.ones(CLASSES, FEATURES), "bias": torch.ones(CLASSES)}, {}
    )
    assert trained is not model
    assert torch.equal(trained.weight, torch.ones(CLASSES, FEATURES))


def test_a_model_function_that_gives_the_same_model_again_is_refused_in_the_next_run() -> None:
    backbone = nn.Linear(FEATURES, 8).double()
    frozen = nn.Linear(8, 8).double().requires_grad_(False)

    def task(model: Callable[[], nn.Module]) -> dure.Task:
        return small_task(model=model)

    def head() -> nn.Module:
        return nn.Linear(8, CLASSES).double()

    def around() -> nn.Module:
        return nn.Sequential(backbone, frozen, head())

    stop = dure.Stop(steps=1)
    dure.train(task(around), dure.SingleWorker(), stop=stop)
    with pytest.raises(
        ValueError, match=r"returned the same 0\.weight that an earlier run.*copy\.deepcopy"
    ):
        dure.train(task(around), dure.SingleWorker(), stop=stop)
    # A copy is fresh, and what is frozen may be shared.
    with_copy = task(
        lambda: nn.Sequential(copy.deepcopy(backbone), frozen, nn.Linear(8, CLASSES).double())
    )
    first = dure.train(with_copy, dure.SingleWorker(), stop=stop)
    assert same_bits(first, dure.train(with_copy, dure.SingleWorker(), stop=stop))
