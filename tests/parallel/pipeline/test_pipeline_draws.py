"""Random numbers and running statistics are, to the last bit, those of the undivided model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from beside import CLOSE, alone, on_ranks, pipeline, walk
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.rng import STATE_BYTES
from small import CLASSES, FEATURES, same_bits, small_task


def distances(state: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor whose bits differ."""
    return {
        name: float((state[name] - value).abs().max())
        for name, value in right.items()
        if not torch.equal(state[name], value)
    }


def decoder() -> nn.Module:
    """Dropout in the embedding, the attention and behind it."""
    return dure.models.Transformer(11, 6, layers=2, heads=2, width=8, dropout=0.3).double()


def texts() -> dure.Task:
    words = torch.randint(0, 11, (20, 6), generator=torch.Generator().manual_seed(0))
    return dure.Task(
        decoder,
        F.cross_entropy,
        (words, words),
        None,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )


class Noisy(dure.Examples):
    """Examples that draw when they are read."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        super().__init__(inputs, targets)
        self.draws = True

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        inputs, targets = super().batch(indices)
        return inputs + torch.randn_like(inputs), targets

    def to(self, dtype: torch.dtype) -> Noisy:
        return self


def dropped() -> nn.Module:
    layers = [
        nn.Linear(FEATURES, 8),
        nn.Dropout(0.4),
        nn.Linear(8, 8),
        nn.AlphaDropout(0.2),
        nn.Linear(8, CLASSES),
    ]
    return nn.Sequential(*layers).double()


def noisy() -> dure.Task:
    task = small_task()
    return small_task(model=dropped, train=Noisy(task.train.inputs, task.train.targets))


def test_one_micro_batch_has_the_bits_of_one_worker() -> None:
    made = [texts, noisy]
    ones = [
        dure.train(make(), dure.SingleWorker(8), stop=dure.Stop(steps=4), seed=2) for make in made
    ]

    def program(context: RankContext) -> list[dict[str, Tensor]]:
        strategy = pipeline(context, schedule="naive", recompute=True)
        return [walk(context, make(), strategy, 4, seed=2)[0].state for make in made]

    for ranks in (1, 3):
        for state, one in zip(on_ranks(ranks, program)[0], ones, strict=True):
            assert distances(state, one.model.state_dict()) == {}, ranks


def test_the_state_of_the_generator_travels_with_the_values() -> None:
    def program(context: RankContext) -> tuple[int, int]:
        _, learner = walk(context, texts(), pipeline(context, schedule="naive"), 1)
        cut = learner.rank_state.cut
        assert isinstance(cut, CutModel)
        there, back = cut.message_bytes(0, 8)
        return (
            context.group.meter.counters.bytes_sent,
            there + STATE_BYTES if context.group.rank == 0 else back,
        )

    for sent, expected in on_ranks(2, program):
        assert sent == expected
    assert STATE_BYTES == 5056


def test_several_micro_batches_draw_the_same_wherever_they_are() -> None:
    options: list[dict[str, Any]] = [
        {"schedule": "1f1b", "recompute": True},
        {"schedule": "zero-bubble", "cut": ("blocks.1",)},
        {"schedule": "interleaved"},
        {"schedule": "zero-bubble-v", "recompute": True},
    ]

    def program(context: RankContext) -> list[dict[str, Tensor]]:
        chosen = options if context.group.size == 2 else [{"schedule": "gpipe"}]
        return [
            walk(context, texts(), pipeline(context, microbatches=2, **each), 3)[0].state
            for each in chosen
        ]

    (one,) = on_ranks(1, program)[0]
    for state, each in zip(on_ranks(2, program)[0], options, strict=True):
        if each["schedule"].startswith(
            "zero"
        ):  # sums of a weight's gradients are rounded in another order
            assert all(
                float((state[name] - value).abs().max()) < CLOSE for name, value in one.items()
            ), each
        else:
            assert all(torch.equal(state[name], value) for name, value in one.items()), each


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [FEATURES, 8, 8, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes[1:])
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            inputs = torch.tanh(norm(layer(inputs)))
        return inputs


def test_running_statistics_are_those_of_accumulated_micro_batches() -> None:
    task = small_task(model=Normed, n=40)

    def program(context: RankContext) -> list[dict[str, Tensor]]:
        choices: list[dict[str, Any]] = [
            {"recompute": True},
            {"schedule": "gpipe"},
            {"schedule": "zero-bubble"},
        ]
        return [
            walk(context, task, pipeline(context, microbatches=4, **each), 5)[0].state
            for each in choices
        ]

    expected = alone(task, Parallel(Mesh(), 8, 4), 5).state
    assert int(expected["norms.0.num_batches_tracked"]) == 20
    for state in on_ranks(2, program)[0]:
        for name, value in expected.items():
            assert float((state[name] - value).abs().max()) < 1e-12, name


def test_a_run_with_several_micro_batches_repeats_itself() -> None:
    from dure.parallel.mesh.pipeline import Pipeline

    task = small_task(model=dropped)
    strategy = Pipeline(8, 3)
    runs = [
        dure.train(task, strategy, dure.Processes(ranks), dure.Stop(steps=3)) for ranks in (2, 3)
    ]
    assert same_bits(*runs)
