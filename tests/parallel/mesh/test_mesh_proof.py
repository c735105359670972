"""Before the first step every run that divides layers tries its plan, and shows nothing of it."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import cloudpickle
import loops
import pytest
import torch
from loops import on_ranks
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.errors import PlanError
from dure.parallel.mesh import proof
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.tensor import Column, OnShards, Row

for module in (sys.modules[__name__], loops):
    cloudpickle.register_pickle_by_value(module)


def network() -> nn.Module:
    """Its norm lies in the divided region, where a rank sees a part of its features alone."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), Scaled(), nn.Linear(8, 6), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs


WRONG = {"0": Column(), "3": Row()}
RIGHT = {**WRONG, "2": OnShards()}


def task() -> dure.Task:
    generator = torch.Generator().manual_seed(1)
    examples = torch.randn(24, 6, generator=generator).double(), torch.arange(24) % 3
    return dure.Task(network, F.cross_entropy, examples, examples, partial(torch.optim.SGD, lr=0.1))


MESHES = [
    Parallel(Mesh(tensor=2), 12, 2, plan=WRONG),
    Parallel(Mesh(2, 1, 2), 12, 2, zero=3, plan=WRONG),
    Parallel(Mesh(1, 2, 2), 12, 2, plan=WRONG),
]


@pytest.mark.parametrize("strategy", MESHES)
def test_a_wrong_plan_is_refused_on_every_mesh(strategy: Parallel) -> None:
    with pytest.raises(
        PlanError,
        match=r"^2\.weight: the plan has no entry for it; .*the sum over the ranks is right",
    ):
        dure.train(task(), strategy, dure.Processes(strategy.mesh.size), dure.Stop(steps=1))


class Recurrent(nn.Module):
    """A block whose first passes have no gradient, as in a hierarchical reasoning model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            inputs = self.second(self.first(inputs).tanh())
        result: torch.Tensor = self.second(self.first(inputs).tanh())
        return result


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Recurrent(), nn.Linear(6, 6), nn.Linear(6, 3)).double()


def test_a_divided_layer_without_a_gradient_is_refused_in_a_pipeline() -> None:
    data = task().train
    plan = {"0.first": Column(), "0.second": Row()}
    for mesh in (Mesh(1, 2, 2), Mesh(tensor=2)):
        strategy = Parallel(mesh, 12, 2, plan=plan)
        work = partial(
            dure.train,
            dure.Task(recurrent, F.cross_entropy, data, optimizer=partial(torch.optim.SGD, lr=0.1)),
            strategy,
            dure.Processes(mesh.size),
            dure.Stop(steps=1),
        )
        if mesh.pipeline > 1:
            with pytest.raises(ValueError, match=r"the plan divides 0\.first, .*no_grad"):
                work()
        else:
            work()


def test_a_proof_is_recorded_and_leaves_the_run_as_it_would_be_without() -> None:
    strategy = dure.TensorParallel(12, plan=RIGHT)
    runs = [
        dure.train(task(), strategy, dure.Processes(2), dure.Stop(steps=3), check=check)
        for check in (True, False)
    ]
    tried, trusted = runs
    (shown,) = tried.summary["proofs"]
    assert shown["what"] == proof.PROVEN
    assert trusted.summary["proofs"] == []
    for name, weight in trusted.model.state_dict().items():
        assert torch.equal(tried.model.state_dict()[name], weight), name
    for key in ("bytes_sent", "bytes_received"):
        assert tried.summary[key] == trusted.summary[key]
    assert [step.loss for step in tried.history.steps] == [
        step.loss for step in trusted.history.steps
    ]


def test_a_wrong_plan_trains_where_the_user_asks_for_no_check() -> None:
    strategy = dure.TensorParallel(12, plan=WRONG)
    run = dure.train(task(), strategy, dure.Processes(2), dure.Stop(steps=1), check=False)
    assert run.summary["steps"] == 1


def test_a_plan_that_memory_is_too_short_for_is_not_tried_and_the_run_says_so() -> None:
    def program(context: RankContext) -> Any:
        # As little is free on one rank alone.
        if context.group.rank == 1:
            proof.available_memory = lambda: 100
        learner = ParallelLearner(task(), context, 0, MESHES[0])
        return [one.what for one in learner.proofs], context.group.meter.counters.bytes_sent

    for (what,), sent in on_ranks(2, program):
        assert sent == 0, "nothing is trained yet"
        assert re.match(
            r"the plan was not tried: beside the undivided model it needs \S+ GB on each rank, of "
            r"which 5e-08 GB are free",
            what,
        )
