"""Every way to divide the work on models with complex weights, hooks, long square layers and unused
parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.compression import TopK
from dure.contracts.world import RankContext
from dure.parallel import DistributedDataParallel
from small import CLASSES, FEATURES, largest_difference, small_task


def on_ranks(ranks: int, program: Callable[[RankContext], Any]) -> list[Any]:
    def gathered(context: RankContext) -> list[Any]:
        torch.set_num_threads(1)
        return [
            pickle.loads(part)
            for part in context.group.gather_bytes(pickle.dumps(program(context)))
        ]

    result: list[Any] = dure.Processes(ranks, deadline=120).run(gathered, lambda event: None)
    return result


def train(task: dure.Task, strategy: Any, world: Any = None, steps: int = 4) -> dure.Run:
    return dure.train(
        task, strategy, world or dure.Processes(2, deadline=120), dure.Stop(steps=steps)
    )


# Long weights, whose gradients are computed where they leave from


@pytest.mark.parametrize("rows", [1024, 1000])
def test_as_many_examples_as_a_long_layer_has_outputs(rows: int) -> None:
    def program(context: RankContext) -> list[float]:
        torch.manual_seed(0)
        layers = [
            nn.Linear(1024, 1024),
            nn.Tanh(),
            nn.Linear(1024, 1024),
            nn.Tanh(),
            nn.Linear(1024, 4),
        ]
        model = nn.Sequential(*layers)
        alone = copy.deepcopy(model)
        divided = DistributedDataParallel(model, context.group, overlap="beside")
        apart = []
        for step in range(3):
            inputs = torch.randn(2 * rows, 1024, generator=torch.Generator().manual_seed(step))
            alone.zero_grad()
            alone(inputs).square().mean().backward()
            divided.zero_grad()
            divided(inputs.chunk(2)[context.group.rank]).square().mean().backward()
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            apart += [float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs]  # type: ignore[operator,union-attr]
        return apart

    assert max(max(apart) for apart in on_ranks(2, program)) < 1e-4


# Complex weights


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype)


class Abs(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.abs()


def complex_network(dtype: torch.dtype = torch.complex64) -> nn.Module:
    inner = [nn.Linear(FEATURES, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 8, dtype=dtype)]
    return nn.Sequential(Cast(dtype), *inner, Abs(), nn.Linear(8, CLASSES, dtype=dtype.to_real()))


def complex_task(dtype: torch.dtype = torch.complex64) -> dure.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, FEATURES, generator=generator)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return small_task(
        model=partial(complex_network, dtype),
        train=(inputs, inputs.argmax(1) % CLASSES),
        test=None,
        optimizer=optimizer,
    )


@pytest.mark.parametrize(
    ("strategy", "clip"),
    [
        (partial(dure.DataParallel, 8), None),
        (partial(dure.ZeRO, 2, 8), 0.01),
        (partial(dure.ZeRO, 3, 8), None),
        (partial(dure.TensorParallel, 8), None),
        (partial(dure.TensorParallel, 8), 0.01),
        (partial(dure.Pipeline, 8, 2), 0.01),
        (partial(dure.Pipeline, 8, 2, "zero-bubble"), None),
    ],
)
def test_complex_weights_walk_the_path_of_one_worker(strategy: Any, clip: float | None) -> None:
    task = replace(complex_task(), clip_norm=clip)
    alone = train(task, dure.DataParallel(8), dure.Processes(1))
    assert largest_difference(train(task, strategy()), alone) < 1e-5


@pytest.mark.parametrize(
    "strategy",
    [dure.LocalSGD(8, 2, momentum="average"), dure.DiLoCo(8, 2), dure.ADMM(8), dure.ParallelSGD(8)],
)
def test_complex_weights_are_averaged(strategy: Any) -> None:
    run = dure.train(complex_task(), strategy, dure.Processes(2, deadline=120), dure.Stop(rounds=2))
    assert run.summary["ended"] == "rounds"


@pytest.mark.parametrize(
    "strategy", [dure.DataParallel(8), dure.TensorParallel(8), dure.Pipeline(8, 2)]
)
def test_complex_numbers_of_double_precision_are_saved_and_loaded(
    strategy: Any, tmp_path: Path
) -> None:
    task = complex_task(torch.complex128)
    arguments = task, strategy, dure.Processes(2, deadline=120)
    whole = dure.train(*arguments, dure.Stop(steps=6), out=tmp_path / "whole")
    dure.train(*arguments, dure.Stop(steps=3), out=tmp_path / "broken")
    gone_on = dure.resume(tmp_path / "broken", task=task, stop=dure.Stop(steps=6))
    assert largest_difference(gone_on, whole) == 0
    assert largest_difference(dure.load_run(tmp_path / "broken", task.model), whole) == 0


class Conjugated(nn.Module):
    """A weight, a buffer, values between layers and gradients are views that are yet to be
    conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(FEATURES, 8, dtype=torch.complex64).conj())
        self.turn: Tensor
        self.register_buffer("turn", torch.full((8,), 0.6 + 0.8j).conj())
        self.second = nn.Parameter(torch.randn(8, CLASSES, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = (inputs.to(torch.complex64) @ self.first.conj()).conj() * self.turn
        scores: Tensor = (hidden @ self.second.conj()).real
        return scores


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        (dure.DataParallel(8), "gloo"),
        (dure.ZeRO(1, 8), "gloo"),
        (dure.ZeRO(3, 8), "dure"),
        (dure.Pipeline(8, 2), "dure"),
    ],
)
def test_views_that_are_yet_to_be_conjugated(strategy: Any, backend: Any) -> None:
    def program(context: RankContext) -> dict[str, Tensor]:
        learner = strategy.learner(small_task(lr=0.01, model=Conjugated, test=None), context, 0)
        for _ in range(3):
            learner.advance(0)
        found: dict[str, Tensor] = learner.weights()
        return found

    def ranks(number: int) -> dict[str, Tensor]:
        kept: list[Any] = []
        world = dure.Processes(number, deadline=120, backend=backend)
        packed = world.run(lambda context: pickle.dumps(program(context)), kept.append)
        found: dict[str, Tensor] = pickle.loads(packed)
        return found

    divided, alone = ranks(2), ranks(1)
    assert max(float((divided[name] - alone[name]).abs().max()) for name in alone) < 1e-5


# Hooks and attributes of parameters


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[union-attr,operator]
    return model


@pytest.mark.parametrize("strategy", [dure.Pipeline(8, 2, "zero-bubble"), dure.ZeRO(2, 8)])
def test_hooks_of_parameters_see_their_gradients(strategy: Any) -> None:
    alone = train(small_task(model=hooked), dure.SingleWorker(8), dure.Processes(1))
    assert largest_difference(train(small_task(model=hooked), strategy), alone) < 1e-12


def test_layers_whose_parameters_have_hooks_are_not_divided() -> None:
    with pytest.raises(ValueError, match="no built-in plan"):
        train(small_task(model=hooked), dure.TensorParallel(8))


def rates(parameters: Any) -> torch.optim.Optimizer:
    """Rates that are written on parameters."""
    return torch.optim.SGD(
        [{"params": [p], "lr": getattr(p, "lr", 0.1)} for p in parameters], lr=0.1
    )


def with_rates() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    model[0].weight.lr = 0.5  # type: ignore[union-attr]
    return model


def test_attributes_of_parameters_stay_when_they_are_divided() -> None:
    task = small_task(model=with_rates, optimizer=rates)
    alone = train(task, dure.SingleWorker(8), dure.Processes(1))
    assert largest_difference(train(task, dure.TensorParallel(8)), alone) < 1e-12


# Ranks without examples, parameters that are not used


def test_a_rank_without_examples_while_buckets_are_tried() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 300), *(nn.Linear(300, 300) for _ in range(6)), nn.Linear(300, 3)
        )

    inputs = torch.randn(33, FEATURES, generator=torch.Generator().manual_seed(0))
    task = small_task(lr=0.01, model=deep, train=(inputs, inputs.argmax(1) % 3), test=None)
    alone = train(task, dure.SingleWorker(32), dure.Processes(1), 7)
    assert (
        largest_difference(train(task, dure.DataParallel(32, overlap="beside"), steps=7), alone)
        < 1e-4
    )


def test_what_compression_remembers_of_a_parameter_arrives_though_nobody_uses_it() -> None:
    def program(context: RankContext) -> tuple[float, float]:
        used, seldom = nn.Linear(30, 30).double(), nn.Linear(30, 30).double()
        both = nn.ModuleList([used, seldom])
        both.forward = lambda x, with_both: used(x) + seldom(x) if with_both else used(x)  # type: ignore[method-assign]
        divided = DistributedDataParallel(
            both, context.group, compression=TopK(0.3), bucket_bytes=1 << 30
        )
        arrived, right = torch.zeros(30, 30).double(), torch.zeros(30, 30).double()
        for step in range(40):
            divided.zero_grad()
            inputs = torch.randn(8, 30, generator=torch.Generator().manual_seed(step)).double() / (
                1 + 9 * (step > 0)
            )
            divided(inputs, step == 0).square().sum().backward()
            if seldom.weight.grad is not None:
                arrived += seldom.weight.grad
            if step == 0:
                (right,) = torch.autograd.grad(
                    (used(inputs) + seldom(inputs)).square().sum(), [seldom.weight]
                )
        return float((arrived - right).norm()), float(right.norm())

    lost, whole = on_ranks(2, program)[0]
    assert lost < 0.05 * whole


# In place


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Dropout(0.2, inplace=True)])
def test_a_first_layer_that_writes_into_its_inputs(first: nn.Module) -> None:
    def model() -> nn.Module:
        return nn.Sequential(copy.deepcopy(first), nn.Linear(FEATURES, CLASSES).double())

    run = train(
        small_task(model=model, loss=F.cross_entropy), dure.DataParallel(8), dure.Threads(2)
    )
    assert run.summary["steps"] == 4


# Sparse gradients


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(19, 8, sparse=True).double(), nn.Linear(8, 3).double()

    def forward(self, indices: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.words(indices).mean(1)))
        return scores


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.DataParallel(8), dure.Threads(2)),
        (dure.DataParallel(8), dure.Processes(2, deadline=120)),
        (dure.ZeRO(2, 8), dure.Processes(2, deadline=120)),
        (dure.Pipeline(8, 2), dure.Processes(2, deadline=120)),
        (
            dure.Parallel(dure.Mesh(data=2, pipeline=2), batch_size=8, microbatches=2),
            dure.Processes(4, deadline=120),
        ),
        (dure.Parallel(dure.Mesh(data=2), batch_size=8, zero=1), dure.Processes(2, deadline=120)),
    ],
    ids=lambda value: getattr(value, "label", type(value).__name__),
)
def test_sparse_gradients_walk_the_path_of_one_worker(
    strategy: Any, world: Any, clip: float | None
) -> None:
    indices = torch.randint(0, 19, (32, 5), generator=torch.Generator().manual_seed(0))
    train_on = (indices, indices.sum(1) % 3)
    task = small_task(model=Bag, train=train_on, test=None, clip_norm=clip)
    single = train(task, dure.DataParallel(8), dure.Processes(1))
    assert largest_difference(train(task, strategy, world), single) < 1e-12
