"""Models made at random, cut at random places, learn what they learn undivided."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from beside import CLOSE, Path, alone, distance, on_ranks, pipeline, task_of, walk
from torch import Tensor, nn
from torch.nn import functional as F

from dure.contracts.world import RankContext
from dure.parallel.pipeline.cut import CutModel

WIDTH = 4
MODELS = 10

KINDS = (
    "linear",
    "tied",
    "frozen",
    "product",
    "in place",
    "written",
    "viewed",
    "dict",
    "mask",
    "index",
    "count",
    "assigned",
    "scale",
    "without gradients",
    "chunks",
    "norm",
    "constant",
)


class Anything(nn.Module):
    """Each operation takes two of the values that there are, wherever they were made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.plan = [
            (chance.choice(KINDS), chance.random(), chance.random())
            for _ in range(chance.randint(5, 12))
        ]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.plan)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.plan)
        for number, (kind, _, _) in enumerate(self.plan):
            self.layers[number].requires_grad_(kind != "frozen")
            self.register_buffer(f"count{number}", torch.zeros(()), persistent=number % 2 == 0)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.out = nn.Linear(2 * WIDTH, 3)
        self.double()

    def apply_one(self, number: int, kind: str, one: Tensor, two: Tensor) -> Any:
        layer = self.layers[number]
        count = f"count{number}"
        match kind:
            case "linear" | "frozen":
                return torch.tanh(layer(one)) + two
            case "tied":
                return torch.tanh(F.linear(one, self.tied.weight)) + F.linear(
                    two, self.tied.weight.T
                )
            case "product":
                return torch.sigmoid(one) * two
            case "in place":
                return F.relu(1.5 * one, inplace=True).add_(two)
            case "written":
                rows = torch.zeros(len(one), WIDTH, dtype=one.dtype)
                rows[:, : WIDTH // 2] = layer(one)[:, : WIDTH // 2]
                rows[:, -1] += two[:, 0]
                return rows
            case "viewed":
                copy = one * 0.5
                copy.view(-1, 2, WIDTH // 2)[:, 0].mul_(2)
                return copy + two
            case "dict":
                return {"first": one - two, "rest": (layer(two), [one * 0.1])}
            case "mask":
                return torch.where(one > two, layer(one), two)
            case "index":
                return self.table(one.argmax(dim=1)) + two
            case "count":
                getattr(self, count).add_(1.0 if self.training else 0.0)
                return one * (1 + 0.1 * getattr(self, count)) + two
            case "assigned":
                if self.training:
                    setattr(self, count, getattr(self, count) * 0.5 + 1)
                return one * getattr(self, count) + two
            case "scale":
                return one * self.scale + two.flip(1) * self.scale[:1]
            case "without gradients":
                with torch.no_grad():
                    fixed = layer(one)
                return fixed + two
            case "chunks":
                left, right = layer(one).chunk(2, dim=1)
                return torch.cat([right, left], dim=1) * two.detach().sum(1, keepdim=True).sigmoid()
            case "norm":
                return self.norms[number](one) + two
            case _:
                mask = torch.ones(WIDTH, WIDTH, dtype=one.dtype)
                mask[0] = 0
                mask.tril_()
                return one @ mask + two

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        values = [inputs["numbers"], inputs["numbers"] * inputs["weights"][:, None]]
        for number, (kind, first, second) in enumerate(self.plan):
            made = self.apply_one(
                number,
                kind,
                values[int(first**0.5 * len(values))],
                values[int(second * len(values))],
            )
            values += (
                [made["first"], made["rest"][0] + made["rest"][1][0]]
                if isinstance(made, dict)
                else [made]
            )
        scores = self.out(torch.cat([values[-1].tanh(), values[len(values) // 2].tanh()], dim=1))
        return {"scores": scores, "more": (values[-1], torch.arange(3))}


def loss(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["scores"], targets) + 0.01 * outputs["more"][0].tanh().mean()


def task(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "numbers": torch.randn(18, WIDTH, generator=generator, dtype=torch.float64),
        "weights": torch.rand(18, generator=generator, dtype=torch.float64),
    }
    targets: Any = torch.randint(0, 3, (18,), generator=generator)
    made = task_of(partial(Anything, seed), inputs, targets, loss=loss)  # type: ignore[arg-type]
    object.__setattr__(made, "metrics", {})
    return made


def options_of(seed: int) -> dict[str, Any]:
    chance = random.Random(1000 + seed)
    names = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]
    return {
        "schedule": chance.choice(names),
        "microbatches": chance.choice([2, 3]),
        "batch_size": 9,
        "recompute": chance.random() < 0.5,
    }


def cut_anywhere(seed: int, patch: pytest.MonkeyPatch) -> None:
    """At random places, but where a model must not be cut."""

    def choose(cut: CutModel, names: Any, balance: Any) -> list[int]:
        places = [
            place
            for place in range(1, len(cut.reference.stage_operations))
            if place not in cut.reference.inseparable
        ]
        return sorted(random.Random(seed).sample(places, cut.stages - 1))

    patch.setattr(CutModel, "choose", choose)


def learned(context: RankContext, seed: int) -> float | None:
    """How far a random model is from itself undivided; None if even that cannot be trained."""
    strategy = pipeline(context, **options_of(seed))
    try:
        expected: Path = alone(task(seed), strategy, 3, seed)
    except RuntimeError:  # it changes what backward needs
        return None
    with pytest.MonkeyPatch.context() as patch:
        cut_anywhere(seed, patch)
        path, _ = walk(context, task(seed), strategy, 3, seed)
    return distance(path, expected) if context.group.rank == 0 else 0.0


@pytest.mark.parametrize("ranks", [1, 3])
def test_random_models_learn_the_same(ranks: int) -> None:
    def program(context: RankContext) -> dict[int, float | None]:
        return {seed: learned(context, seed) for seed in range(ranks, ranks + MODELS // 2)}

    found = on_ranks(ranks, program, deadline=200)[0]
    for seed, far in found.items():
        assert far is None or far < CLOSE, (seed, far, options_of(seed), Anything(seed).plan)
    assert sum(far is not None for far in found.values()) > len(found) // 2
