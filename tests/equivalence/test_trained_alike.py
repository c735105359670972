"""What a task asks of training is done alike in every system, or refused in one line.

First the single worker is compared with the same loop written by hand with torch's own tools; then
every system that walks its path with the single worker, with all of it asked for at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dure
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.data.batches import Batches
from small import largest_difference, network, same_bits, small_task

STEPS = 6
MOMENTUM = partial(torch.optim.SGD, lr=0.3, momentum=0.5, weight_decay=0.01)
PLAIN = partial(torch.optim.SGD, lr=0.3)
SCHEDULE = (1.0, 0.5, 0.25, 1.0, 0.1, 0.7)


def schedule(step: int) -> float:
    return SCHEDULE[step % len(SCHEDULE)]


def partly_frozen() -> nn.Sequential:
    """The first weights are frozen for good."""
    model = network()
    assert isinstance(model, nn.Sequential)
    model[0].weight.requires_grad_(False)
    return model


def groups(parameters: Any) -> torch.optim.Optimizer:
    """Two groups of parameters, with rates of their own."""
    first, *others = list(parameters)
    return torch.optim.SGD(
        [{"params": [first], "lr": 0.05}, {"params": others}], lr=0.3, momentum=0.5
    )


EVERYTHING: Mapping[str, Any] = {
    "clip_norm": 0.2,
    "ema": 0.8,
    "unfreeze": {"2.*": 3},
    "lr_schedule": schedule,
    "model": partly_frozen,
}


def by_hand(task: dure.Task, steps: int, seed: int, batch_size: int = 8) -> dict[str, Tensor]:
    """The loop that people write, with torch's own tools."""
    model = seeded_model(task, seed).train()
    optimizer = task.optimizer(model.parameters())
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, task.lr_schedule or (lambda step: 1.0))
    decay = task.ema if task.ema is not None else 0.0
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    train = examples_for(task)[0]
    batches = Batches(len(train), batch_size, seed)
    for step in range(steps):
        inputs, targets = train.batch(batches.at(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            loss = task.loss(model(inputs), targets)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        if step < 3 and task.unfreeze:
            model[2].weight.grad = model[2].bias.grad = None  # type: ignore[index, union-attr]
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        rates.step()
        average.update_parameters(model)
    return dict((model if task.ema is None else average.module).state_dict())


def apart(run: dure.Run, right: Mapping[str, Tensor]) -> float:
    weights = run.model.state_dict()
    return max(float((weights[name] - right[name]).abs().max()) for name in right)


@pytest.mark.parametrize(
    "asked",
    [
        {"clip_norm": 0.2},
        {"ema": 0.8},
        {"unfreeze": {"2.*": 3}},
        {"lr_schedule": schedule},
        {"optimizer": groups},
        {
            "precision": "bf16",
            "model": partial(network, torch.float32),
            "dtype": torch.float32,
        },
        {"optimizer": partial(torch.optim.AdamW, lr=0.01), **EVERYTHING},
    ],
    ids=["clip", "ema", "unfreeze", "schedule", "groups", "bf16", "everything"],
)
def test_the_single_worker_trains_as_the_loop_that_people_write(asked: dict[str, Any]) -> None:
    task = small_task(**{"optimizer": MOMENTUM, **asked})
    run = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    assert apart(run, by_hand(task, STEPS, 3)) == 0
    kept = {name: asked[name] for name in ("model", "dtype") if name in asked}
    plain = small_task(optimizer=MOMENTUM, **kept)
    untouched = dure.train(plain, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    assert largest_difference(run, untouched) > 1e-6


ALIKE: dict[str, tuple[Strategy, World | None, dict[str, Any]]] = {
    "single-worker": (dure.SingleWorker(8, accumulate=3), None, {}),
    "data-parallel": (dure.DataParallel(8, accumulate=2), dure.Processes(2), {}),
    "data-parallel, threads": (dure.DataParallel(8), dure.Threads(2), {}),
    "layers-per-core": (dure.LayersPerCore(8, 2), dure.Threads(2), {}),
    "hogwild": (dure.Hogwild(8, period=1, accumulate=2), dure.Threads(1), {}),
    "hogwild, processes": (dure.Hogwild(8, period=1), dure.Processes(1), {"ema": None}),
    "zero 1": (dure.ZeRO(1, 8, accumulate=2), dure.Processes(2), {}),
    "zero": (dure.ZeRO(2, 8), dure.Processes(2), {}),
    "zero 3": (dure.ZeRO(3, 8), dure.Processes(2), {}),
    "tensor-parallel": (dure.TensorParallel(8), dure.Processes(2), {}),
    "pipeline": (dure.Pipeline(8, 2), dure.Processes(2), {}),
    "parallel": (dure.Parallel(dure.Mesh(2, 2), 8, 2, zero=1), dure.Processes(4), {}),
    "parallel, zero 3": (dure.Parallel(dure.Mesh(2), 8, 2, zero=3), dure.Processes(2), {}),
    "local-sgd": (dure.LocalSGD(8, 1, accumulate=2), dure.Processes(1), {}),
    "diloco": (
        dure.DiLoCo(8, 1, outer_lr=1.0, outer_momentum=0.0),
        dure.Processes(1),
        {},
    ),
    "parameter-server": (
        dure.ParameterServer(workers=1, batch_size=8, period=1, accumulate=2),
        dure.Simulated(),
        {"ema": None, "optimizer": PLAIN},
    ),
    "parameter-server, processes": (
        dure.ParameterServer(workers=1, batch_size=8, period=1),
        None,
        {"ema": None, "optimizer": PLAIN},
    ),
    "downpour": (
        dure.Downpour(replicas=1, batch_size=8, overlap=False, period=1, accumulate=2),
        dure.Simulated(),
        {"ema": None, "optimizer": PLAIN},
    ),
}
"""Systems that walk the path of one worker, and what of `EVERYTHING` they refuse."""


@pytest.mark.parametrize("name", ALIKE)
def test_every_system_trains_as_the_single_worker_with_all_of_it(name: str) -> None:
    strategy, world, changes = ALIKE[name]
    task = small_task(**{"optimizer": MOMENTUM, **EVERYTHING, **changes})
    stop = dure.Stop(rounds=STEPS) if strategy.traits.unit == "round" else dure.Stop(steps=STEPS)
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    many = dure.train(task, strategy, world, stop, seed=3)
    assert largest_difference(many, one) < 1e-12
    first = seeded_model(task, 3).state_dict()["0.weight"]
    assert torch.equal(many.model.state_dict()["0.weight"], first)
    assert many.summary["test_loss"] == pytest.approx(one.summary["test_loss"], abs=1e-12)


class Told(nn.Module):
    """A model that computes something else where the compiler traces it, and draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs)
        return scores * 0.5 if torch.compiler.is_compiling() else scores


class Halved(Told):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 0.5


COMPILED: list[tuple[Strategy, World | None]] = [
    (dure.SingleWorker(8), None),
    (dure.DataParallel(8), dure.Processes(2)),
    (dure.LocalSGD(8, 1), dure.Processes(1)),
    (dure.DiLoCo(8, 1), dure.Processes(1)),
    (dure.ParallelSGD(8), dure.Processes(1)),
    (dure.Hogwild(8, period=1), dure.Processes(1)),
    (dure.ParameterServer(workers=1, batch_size=8, period=1), dure.Simulated()),
    (dure.Downpour(replicas=1, batch_size=8, overlap=False, period=1), dure.Simulated()),
]


@pytest.mark.parametrize(("strategy", "world"), COMPILED, ids=lambda one: getattr(one, "name", ""))
def test_what_is_called_is_what_the_compiler_made(strategy: Any, world: Any) -> None:
    stop = dure.Stop(rounds=2) if strategy.traits.unit == "round" else dure.Stop(steps=2)
    compiled = small_task(model=Told, compile="eager", optimizer=PLAIN)
    halved = dure.train(small_task(model=Halved, optimizer=PLAIN), strategy, world, stop, seed=3)
    assert same_bits(dure.train(compiled, strategy, world, stop, seed=3), halved)


RESUMED: list[tuple[Strategy, World | None]] = [
    (dure.SingleWorker(8), None),
    (dure.DataParallel(8), dure.Threads(2)),
    (dure.Parallel(dure.Mesh(tensor=2), 8, 1, "naive"), dure.Processes(2)),
    (dure.Parallel(dure.Mesh(2), 8, 2, zero=2), dure.Processes(2)),
    (dure.LocalSGD(8, 2), dure.Processes(2)),
    (dure.ZeRO(1, 8), dure.Processes(2)),
    (dure.ZeRO(3, 8), dure.Processes(2)),
    (dure.ADMM(8), dure.Processes(2)),
    (dure.ParallelSGD(8, combine_every=1), dure.Processes(2)),
]


@pytest.mark.parametrize(("strategy", "world"), RESUMED, ids=lambda one: getattr(one, "name", ""))
def test_averages_are_those_of_the_models_of_every_step_and_go_on_to_the_same_bits(
    strategy: Any, world: Any, tmp_path: Path
) -> None:
    task = small_task(optimizer=MOMENTUM)
    averaged = small_task(optimizer=MOMENTUM, ema=0.8)

    def after(count: int, task: dure.Task, **where: Any) -> dure.Run:
        stop = (
            dure.Stop(rounds=count) if strategy.traits.unit == "round" else dure.Stop(steps=count)
        )
        if where.get("resume"):
            return dure.resume(where["resume"], task=task, stop=stop)
        return dure.train(task, strategy, world, stop, seed=3, **where)

    whole = after(3, averaged)
    after(2, averaged, out=tmp_path / "run")
    assert same_bits(after(3, averaged, resume=tmp_path / "run"), whole)
    models = [after(count, task).model.state_dict() for count in (1, 2, 3)]
    right = {name: one.clone() for name, one in models[0].items()}
    for model in models[1:]:
        for name, one in right.items():
            one.lerp_(model[name], 1 - 0.8)
    assert apart(whole, right) < 1e-15
    assert apart(whole, models[-1]) > 1e-6


OWN_PATHS: list[tuple[Strategy, World | None]] = [
    (dure.ADMM(8, local_steps=1, accumulate=2), dure.Processes(2)),
    (dure.ParallelSGD(None, accumulate=2), dure.Processes(2)),
]


@pytest.mark.parametrize(("strategy", "world"), OWN_PATHS, ids=lambda one: getattr(one, "name", ""))
def test_workers_with_paths_of_their_own_clip_each_step_and_leave_alone_what_is_frozen(
    strategy: Any, world: Any
) -> None:
    """One step of each worker, so long as the rate times the norm; their mean is no longer."""
    task = small_task(optimizer=PLAIN, clip_norm=0.01, unfreeze={"0.*": 1})
    stop = dure.Stop(rounds=1)
    run = dure.train(task, strategy, world, stop, seed=3)
    first = seeded_model(task, 3).state_dict()
    ways = {name: one - first[name] for name, one in run.model.state_dict().items()}
    length = float(torch.cat([one.reshape(-1) for one in ways.values()]).norm())
    assert 0 < length <= 0.3 * 0.01 * (1 + 1e-6)
    assert not ways["0.weight"].any()
    assert ways["2.weight"].any()
    # Pieces add up to the batch: the same without them.
    others = dure.train(task, dataclasses.replace(strategy, accumulate=1), world, stop, seed=3)
    assert largest_difference(run, others) < 1e-15


@given(
    st.integers(1, 9),
    st.sampled_from(["first", "sum"]),
)
@settings(max_examples=10, deadline=None)
def test_a_batch_in_any_number_of_pieces_has_one_gradient(pieces: int, loss: str) -> None:
    """Also where the loss tells only when it is computed what it counts."""

    def told(outputs: Tensor, targets: Tensor) -> Any:
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        counts = 1.0 + targets.double()
        return (losses * counts).sum(), counts.sum()

    task = small_task(**({"loss": told} if loss == "sum" else {}))
    stop = dure.Stop(steps=2)
    whole = dure.train(task, dure.SingleWorker(8), stop=stop)
    parts = dure.train(task, dure.SingleWorker(8, accumulate=pieces), stop=stop)
    assert largest_difference(whole, parts) < 1e-12


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"clip_norm": 0}, "give a number greater than 0"),
        ({"precision": "fp8"}, "choose 'full', 'bf16' or 'fp16'"),
        ({"ema": 1.0}, "0 or more and less than 1"),
        ({"compile": 3}, "a backend of torch.compile"),
        ({"unfreeze": ["0"]}, "the step from which"),
        ({"unfreeze": {"0.*": -1}}, "0 or more"),
    ],
)
def test_values_that_cannot_be_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_task(**asked)


@pytest.mark.parametrize(
    ("unfreeze", "message"),
    [
        ({"layer.*": 3}, r"unfreeze names 'layer\.\*', which matches no trainable parameter"),
        ({"*": 3}, "freezes every parameter at step 0"),
    ],
)
def test_names_of_parameters_that_are_not_there_are_refused(
    unfreeze: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dure.train(small_task(unfreeze=unfreeze), dure.SingleWorker(8), stop=dure.Stop(steps=1))


def test_a_strategy_of_ones_own_is_asked_what_it_can_do() -> None:
    class Own(dure.SingleWorker):
        traits = replace(dure.SingleWorker.traits, trains_with=frozenset({"clip_norm"}))

    stop = dure.Stop(steps=1)
    dure.train(small_task(clip_norm=1.0), Own(8), stop=stop)
    with pytest.raises(ValueError, match=r"Own cannot train with ema=0\.9: .*; leave it out"):
        dure.train(small_task(ema=0.9), Own(8), stop=stop)


HALVED: list[tuple[Strategy, World | None]] = [
    (dure.DataParallel(8), dure.Threads(2)),
    (dure.LayersPerCore(8, 2), dure.Threads(2)),
    (dure.Hogwild(8, period=1), dure.Threads(1)),
    (dure.LocalSGD(8, 1), dure.Processes(1)),
    (dure.ADMM(8, local_steps=1), dure.Processes(1)),
    (dure.ParallelSGD(8), dure.Processes(1)),
    (dure.ParameterServer(workers=1, batch_size=8, period=1), dure.Simulated()),
    (dure.Downpour(replicas=1, batch_size=8, overlap=False, period=1), dure.Simulated()),
]


@pytest.mark.parametrize(("strategy", "world"), HALVED, ids=lambda one: getattr(one, "name", ""))
def test_bf16_computes_roughly_and_keeps_weights(strategy: Any, world: Any) -> None:
    stop = dure.Stop(rounds=2) if strategy.traits.unit == "round" else dure.Stop(steps=2)
    runs = [
        dure.train(
            small_task(
                model=partial(network, torch.float32),
                precision=precision,
                optimizer=PLAIN,
                dtype=torch.float32,
            ),
            strategy,
            world,
            stop,
            seed=3,
        )
        for precision in ("bf16", "full")
    ]
    assert 0 < largest_difference(*runs) < 0.05
    assert all(one.dtype is torch.float32 for one in runs[0].model.parameters())


def in_bf16(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Measurements are in full precision, and take no gradients."""
    assert torch.is_autocast_enabled("cpu") == torch.is_grad_enabled()
    return F.cross_entropy(outputs, targets)


AUTOCAST = [*HALVED, (dure.SingleWorker(8, accumulate=2), dure.Processes(1))]


@pytest.mark.parametrize(
    ("strategy", "world"),
    [(one, world) for one, world in AUTOCAST if one.name != "zero"],
    ids=lambda one: getattr(one, "name", ""),
)
def test_the_loss_is_computed_where_forward_is(strategy: Any, world: Any) -> None:
    stop = dure.Stop(rounds=1) if strategy.traits.unit == "round" else dure.Stop(steps=1)
    model = partial(network, torch.float32)
    task = small_task(
        model=model, precision="bf16", optimizer=PLAIN, loss=in_bf16, dtype=torch.float32
    )
    dure.train(task, strategy, world, stop)
