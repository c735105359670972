"""Pipelines beside the same model undivided, trained with the same micro-batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

# here, so that the fork server does it once and not every rank
import torch._dynamo.functional_export
import torch._export.non_strict_utils
import torch.export._trace
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.world import RankContext
from dure.data.batches import Batches
from dure.parallel.mesh import strategy as combined
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.trace import ModelTrace
from dure.tasks.evaluation import evaluate

CLOSE = 1e-10
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def on_ranks(
    ranks: int, program: Callable[[RankContext], Any], backend: Any = "dure", deadline: float = 120
) -> list[Any]:
    """What `program` returns on every rank, in order of rank."""

    def gathered(context: RankContext) -> list[Any]:
        torch.set_num_threads(
            1
        )  # a rank alone would have all cores, on which some sums are rounded differently
        return [
            pickle.loads(part)
            for part in context.group.gather_bytes(pickle.dumps(program(context)))
        ]

    result: list[Any] = dure.Processes(ranks, deadline=deadline, backend=backend).run(
        gathered, lambda event: None
    )
    return result


def task_of(
    model: Callable[[], nn.Module],
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    optimizer: Any = MOMENTUM,
    test: Any = None,
) -> dure.Task:
    return dure.Task(model, loss, (inputs, targets), test or (inputs, targets), optimizer)


class Path(NamedTuple):
    """Where training has led.

    gradients: of the last step, by name; tests: of the model at the end.
    """

    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float]
    tests: dict[str, float]


def alone(task: dure.Task, strategy: Parallel, steps: int, seed: int = 0) -> Path:
    """The undivided model, one micro-batch after the other."""
    model = seeded_model(task, seed).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = task.optimizer(trained)
    train, test = examples_for(task)
    batches = Batches(len(train), strategy.batch_size, seed)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        indices = batches.at(step)
        losses.append(0.0)
        for part in indices.tensor_split(strategy.mesh.data):
            for piece in part.tensor_split(min(strategy.most, len(part))) if len(part) else []:
                inputs, targets = train.batch(piece)
                loss = task.loss(model(inputs), targets) * (len(piece) / len(indices))
                loss.backward()  # type: ignore[no-untyped-call]
                losses[-1] += float(loss.detach())
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, task.clip_norm)
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    state = {**model.state_dict(), **dict(model.named_buffers())}
    assert test is not None
    group = dure.collectives.group.Group(
        None, dure.record.meter.Meter("alone", dure.record.trace.Trace())
    )
    tests = evaluate(task, model, test, group, 0)
    return Path(state, gradients, losses, tests)


def walk(
    context: RankContext, task: dure.Task, strategy: Parallel, steps: int, seed: int = 0
) -> tuple[Path, ParallelLearner]:
    """The same on the ranks, whole on rank 0."""
    learner = ParallelLearner(task, context, seed, strategy)
    context.group.step = "step"
    losses = [learner.advance(0).loss for _ in range(steps)]
    mine = {name: p.grad for name, p in learner.rank_state.parameters.items() if p.grad is not None}
    gradients: dict[str, Tensor] = {}
    for part in context.group.gather_bytes(pickle.dumps(mine)):
        gradients |= pickle.loads(part)
    state = dict(learner.weights()) | learner.state()["buffers"]
    return Path(state, gradients, losses, learner.evaluate()), learner


def distance(one: Path, other: Path) -> float:
    """The largest difference; infinite where one has what the other has not."""
    far = max((abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)), default=0.0)
    far = max([far, *(abs(one.tests[name] - other.tests[name]) for name in other.tests)])
    for mine, others in ((one.state, other.state), (one.gradients, other.gradients)):
        if mine.keys() != others.keys():
            return float("inf")
        for name in others:
            far = max(
                far,
                float((mine[name].double() - others[name].double()).abs().max())
                if others[name].numel()
                else 0,
            )
    return far


def compare(
    context: RankContext, task: dure.Task, strategy: Parallel, steps: int = 4, seed: int = 0
) -> float:
    """How far the pipeline's path is from the undivided model's, on rank 0; 0 elsewhere."""
    path, _ = walk(context, task, strategy, steps, seed)
    if context.group.rank > 0:
        return 0.0
    return distance(path, alone(task, strategy, steps, seed))


@contextmanager
def traced_once(make: Callable[[], nn.Module]) -> Iterator[None]:
    """All learners that are made inside have one model, with fresh weights, and its traces.

    These take the most time, and are the same for every schedule.
    """
    model = make()
    traces = {}

    class Traced(CutModel):
        def _traced(self, examples: int, training: bool) -> ModelTrace:
            key = examples, training
            if key in traces:
                self._traces[key] = traces[key]
            traces[key] = super()._traced(examples, training)
            return traces[key]

    def fresh(context: RankContext, task: dure.Task, seed: int) -> nn.Module:
        new = seeded_model(task, seed)
        with torch.no_grad():
            for own, other in zip(_tensors(model), _tensors(new), strict=True):
                own.data = other.data
                own.grad = None
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combined, "CutModel", Traced)
        patch.setattr(RankContext, "model", fresh)
        yield


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def pipeline(context: RankContext, **options: Any) -> Parallel:
    """On all ranks."""
    return Parallel(Mesh(pipeline=context.group.size), **{"batch_size": 8, **options})
