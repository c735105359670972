"""Every system that computes modules again has the bits of the same system without."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import loops
import pytest
import torch

# here, so that the fork server does it once and not every rank
import torch.fx.experimental.symbolic_shapes
from loops import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.world import RankContext
from dure.memory.recompute_setting import Recompute
from dure.parallel.tensor.plan import Column, Row

for module in (sys.modules[__name__], loops):
    cloudpickle.register_pickle_by_value(module)

EXAMPLES, WIDTH, CLASSES = 40, 16, 3
PLAN = {"layers.*.wide": Column(), "layers.*.back": Row()}


class Layer(nn.Module):
    """It draws, and norms by its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.wide(self.norm(inputs))), 0.2, self.training)
        outputs: Tensor = inputs + self.back(hidden)
        return outputs


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        outputs: Tensor = self.head(inputs)
        return outputs


class Counting(Chain):
    """A layer that counts its passes in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].passes = 0
        self.layers[1].register_forward_hook(_count)


def _count(layer: nn.Module, *_: Any) -> None:
    layer.passes += 1  # type: ignore[operator, assignment]


def task(model: type[nn.Module] = Chain, **changes: Any) -> dure.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
    targets = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    settings = {"optimizer": optimizer, **changes}
    return dure.Task(model, F.cross_entropy, (inputs, targets), **settings)


def trained(strategy: Strategy, context: RankContext, steps: int = 3) -> dict[str, Tensor]:
    learner = strategy.learner(task(), context, seed=5)
    for _ in range(steps):
        learner.advance(0)
    return {name: value.clone() for name, value in learner.weights().items()}


PAIRS: dict[str, tuple[Strategy, Strategy]] = {
    "data parallel": (
        dure.DataParallel(16, accumulate=2),
        dure.DataParallel(16, accumulate=2, recompute="layers.*"),  # type: ignore[arg-type]
    ),
    "ZeRO 3": (
        dure.ZeRO(3, 16, unit_size=500),
        dure.ZeRO(3, 16, unit_size=500, recompute="layers.0+layers.2.wide"),  # type: ignore[arg-type]
    ),
    "tensor parallel": (
        dure.TensorParallel(16, plan=PLAN),  # type: ignore[arg-type]
        dure.TensorParallel(16, plan=PLAN, recompute="layers.*"),  # type: ignore[arg-type]
    ),
    "a mesh": (
        dure.Parallel(dure.Mesh(data=2), 16, 2, zero=2),
        dure.Parallel(dure.Mesh(data=2), 16, 2, zero=2, recompute=True),
    ),
}


def _compared(context: RankContext) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name, (without, with_it) in PAIRS.items():
        right = trained(without, context)
        tried = trained(with_it, context)
        found[name] = right.keys() == tried.keys() and all(
            torch.equal(right[each], tried[each]) for each in right
        )
    return found


def test_ranks_that_compute_again_have_the_same_bits() -> None:
    first, _ = on_ranks(2, _compared)
    assert first == dict.fromkeys(PAIRS, True)


def run(**fields: Any) -> dure.Run:
    changes = {"model": fields.pop("model", Chain)}
    return dure.train(
        task(**changes), dure.SingleWorker(20, **fields), stop=dure.Stop(steps=4), seed=3
    )


def test_a_budget_chooses_and_says_what_it_predicts() -> None:
    plain = run()
    named = run(recompute="layers.*")
    least = run(recompute=True)
    facts = named.summary["facts"][0]
    assert facts["recomputed"] == ["layers.0", "layers.1", "layers.2"]
    # Nearly all of the model, once more of three times.
    assert 0.3 < facts["recomputed_flops"] < 1 / 3
    most = least.summary["facts"][0]["predicted_bytes"]
    assert most <= facts["predicted_bytes"]
    budgeted = run(memory=f"{most + 1000}")
    assert budgeted.summary["facts"][0]["predicted_bytes"] <= most + 1000
    ample = run(memory="1GB")
    assert ample.summary["facts"][0]["recomputed"] == []
    for other in (named, least, budgeted, ample):
        for name, value in plain.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name]), name


def test_what_cannot_be_is_refused_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"memory 10kB: a step needs at least .* MB"):
        run(memory="10kB")
    with pytest.raises(ValueError, match="there is no module 'layer'"):
        run(recompute="layer")
    with pytest.raises(ValueError, match="give one of the two"):
        run(recompute="layers.*", memory="1GB")
    with pytest.raises(ValueError, match=r"each forward pass of layers.1 changes layers.1.passes"):
        run(model=Counting, recompute="layers.*")
    with pytest.raises(ValueError, match="dp-sgd cannot use memory"):
        run(memory="1GB", privacy="dp-sgd:1:1")
    with pytest.raises(ValueError, match="a pipeline computes traced stages"):
        dure.train(task(), dure.Parallel(dure.Mesh(pipeline=2), 16, memory="1GB"))
    with pytest.raises(ValueError, match="cannot use memory"):
        dure.train(task(), dure.DataParallel(16, memory="1GB"), dure.Threads(2))


def test_a_module_with_side_effects_is_not_chosen() -> None:
    chosen = run(model=Counting, recompute=True).summary["facts"][0]["recomputed"]
    assert not any(name.startswith("layers.1") and name == "layers.1" for name in chosen)
    assert any(name.startswith("layers.0") for name in chosen)


def test_a_run_goes_on_with_another_budget_to_the_same_bits(tmp_path: Any) -> None:
    strategy = dure.SingleWorker(20, recompute="layers.*")  # type: ignore[arg-type]
    assert strategy.recompute == Recompute(("layers.*",))
    whole = dure.train(task(), dure.SingleWorker(20), stop=dure.Stop(steps=5))
    folder = tmp_path / "run"
    dure.train(task(), strategy, stop=dure.Stop(steps=2), out=folder)
    other = dure.SingleWorker(20, memory="1GB")
    on = dure.resume(folder, task=task(), strategy=other, stop=dure.Stop(steps=5))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, on.model.state_dict()[name]), name
