"""Every schedule, number of ranks and cut walks the path of the undivided model."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from beside import CLOSE, compare, on_ranks, pipeline, traced_once, walk
from torch import Tensor, nn

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.data.batches import Batches
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.pipeline.builders import in_order, make
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.split_backward import LONG
from dure.parallel.pipeline.zero_bubble_v import v_shaped
from small import CLASSES, FEATURES, small_task

OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
]


class Deep(nn.Module):
    """Eight layers, and a skip connection over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.last = nn.Linear(10, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        start = hidden = torch.tanh(self.first(inputs))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        scores: Tensor = self.last(torch.cat([start, hidden], dim=1))
        return scores


def schedules(ranks: int, microbatches: int) -> list[dict[str, Any]]:
    own = (
        make("interleaved", ranks, microbatches, 2)
        if microbatches % 2
        else in_order(v_shaped(ranks), microbatches)
    )
    found: list[dict[str, Any]] = [
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "interleaved"},
        {"schedule": "interleaved", "stages_per_rank": 3},
        {"schedule": "zero-bubble"},
        {"schedule": "zero-bubble-v"},
        {"schedule": own.text()},
    ]
    return [{"schedule": "naive"}, *found] if microbatches == 1 else found


def choices(ranks: int) -> list[tuple[dict[str, Any], Any]]:
    """Every schedule, with fewer micro-batches than ranks and with more.

    What else there is to choose changes from one to the next.
    """
    found = []
    for microbatches in {1: (3,), 2: (1, 2, 5), 3: (4,), 4: (3,)}[ranks]:
        for options in schedules(ranks, microbatches):
            number = len(found)
            options = {"microbatches": microbatches, "batch_size": 10, **options}
            options["recompute"] = number % 2 == 1
            options["balance"] = ("estimated", "measured", "memory")[number % 3]
            if options["schedule"] in ("naive", "gpipe", "1f1b", "zero-bubble") and number % 2:
                options["cut"] = tuple(f"layers.{2 * stage - 1}" for stage in range(1, ranks))
            found.append((options, OPTIMIZERS[number // 2 % 2]))
    return found


@pytest.mark.parametrize(
    ("ranks", "ahead"),
    [(1, False), (2, False), (3, False), (4, False), (3, True)],
    ids=["1", "2", "3", "4", "3, receives begun ahead"],
)
def test_steps_are_those_of_the_undivided_model(ranks: int, ahead: bool) -> None:
    """An epoch, whose last batch has one example, and a step of the next.

    ahead: as if no message could lie with its receiver until that asks for it.
    """

    def program(context: RankContext) -> list[float]:
        holds = mock.patch.object(Group, "holds", return_value=False) if ahead else nullcontext()
        with traced_once(Deep), holds:
            return [
                compare(
                    context,
                    small_task(
                        model=Deep,
                        optimizer=optimizer,
                        clip_norm=0.2 if number % 5 < 2 else None,
                    ),
                    pipeline(context, **options),
                    steps=6,
                )
                for number, (options, optimizer) in enumerate(choices(ranks))
            ]

    for distance, (options, _) in zip(on_ranks(ranks, program)[0], choices(ranks), strict=True):
        assert distance < CLOSE, options


def test_long_weights_whose_gradients_are_added_inside_the_product() -> None:
    """Also one that is shared between stages, and used in other ways than by a linear layer."""
    width = 192
    assert width**2 >= LONG

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, width)
            self.last = nn.Linear(width, CLASSES)
            self.layers = nn.ModuleList(
                nn.Linear(width, width, bias=number < 2) for number in range(4)
            )
            self.double()

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(inputs))
            for layer in self.layers:
                hidden = torch.tanh(layer(hidden))
            hidden = hidden @ self.layers[0].weight + self.layers[1].weight.mean(0)
            scores: Tensor = self.last(nn.functional.linear(hidden, self.layers[3].weight))
            return scores

    ways: list[dict[str, Any]] = [
        {"schedule": "gpipe"},
        {"schedule": "1f1b", "recompute": True},
        {"schedule": "interleaved"},
        {"schedule": "zero-bubble"},
    ]

    def program(context: RankContext) -> list[float]:
        with traced_once(Wide):
            found = [
                pipeline(context, batch_size=10, microbatches=4, **options) for options in ways
            ]
            return [
                compare(
                    context,
                    small_task(model=Wide, optimizer=OPTIMIZERS[0], clip_norm=norm),
                    way,
                    steps=5,
                )
                for way, norm in zip(found, (0.2, None, None, None), strict=True)
            ]

    assert max(on_ranks(2, program)[0]) < CLOSE


def test_digits_whose_last_batch_is_smaller() -> None:
    task = dure.load_task("digits")
    assert len(task.train) % 256 != 0
    model = task.model

    def program(context: RankContext) -> float:
        exact = dure.Task(
            lambda: model().double(),
            task.loss,
            task.train,
            task.test,
            task.optimizer,
            dtype=torch.float64,
        )
        steps = -(-len(task.train) // 256) + 1
        return compare(
            context, exact, pipeline(context, batch_size=256, microbatches=3), steps=steps
        )

    assert on_ranks(2, program)[0] < CLOSE


def test_data_groups_of_pipelines() -> None:
    class Normed(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES).double()

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(self.norm(inputs))

    def program(context: RankContext) -> list[float]:
        options: dict[str, Any] = {"batch_size": 11}
        meshes = [Mesh(data=2, pipeline=2), Mesh(data=4), Mesh(pipeline=4)]
        found = [
            compare(context, small_task(model=Deep), Parallel(mesh, microbatches=2, **options), 8)
            for mesh in meshes
        ]
        path, _ = walk(
            context,
            small_task(model=Normed, n=44, clip_norm=0.2),
            Parallel(Mesh(2, 2), microbatches=2, **options),
            4,
        )
        seen = path.state.get("norm.running_mean")
        # two groups of three micro-batches each: what the first group has seen is kept
        batches = Batches(44, 11, 0)
        expected = torch.zeros(FEATURES, dtype=torch.float64)
        for step in range(4):
            for piece in batches.at(step).tensor_split(2)[0].tensor_split(2):
                expected = 0.9 * expected + 0.1 * small_task(n=44).train.batch(piece)[0].mean(0)
        return [*found, float((seen - expected).abs().max()) if seen is not None else 0.0]

    assert max(on_ranks(4, program)[0]) < CLOSE


def test_messages_are_as_long_as_the_formula_says() -> None:
    def program(context: RankContext) -> tuple[int, int]:
        task = small_task(model=Deep)
        strategy = pipeline(context, batch_size=10, microbatches=3)
        learner = ParallelLearner(task, context, 0, strategy)
        for _ in range(2):
            learner.advance(0)
        cut = learner.rank_state.cut
        expected = 0
        assert isinstance(cut, CutModel)
        for examples in 2 * [len(piece) for piece in torch.arange(10).tensor_split(3)]:
            for boundary in range(cut.stages - 1):
                there, back = cut.message_bytes(boundary, examples)
                assert boundary == 0 or there == 10 * 8 * examples, (
                    "the start travels beside what the layers make of it"
                )
                assert there == back
                expected += there * (learner.schedule.home[boundary] == context.group.rank)
                expected += back * (learner.schedule.home[boundary + 1] == context.group.rank)
        return context.group.meter.counters.bytes_sent, expected

    for sent, expected in on_ranks(3, program):
        assert sent == expected > 0
