"""ZeRO under `dure.train`: the path of one worker, its bytes, and runs that go on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.errors import LossNotFiniteError
from dure.parallel.zero.partition_layout import Stage
from small import CLASSES, EXAMPLES, FEATURES, examples, largest_difference, same_bits, small_task

ADAM = partial(torch.optim.AdamW, lr=0.01)
STAGES: tuple[Stage, ...] = (1, 2, 3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stage_walks_the_path_of_one_worker(stage: Stage, ranks: int) -> None:
    assert EXAMPLES % 10 == 1, "the last batch of an epoch has fewer examples than ranks"
    task, stop = small_task(optimizer=ADAM), dure.Stop(epochs=2)
    many = dure.train(task, dure.ZeRO(stage, 10, unit_size=60), dure.Processes(ranks), stop, seed=3)
    one = dure.train(task, dure.SingleWorker(10), stop=stop, seed=3)
    assert largest_difference(many, one) < 1e-12
    assert abs(many.summary["test_loss"] - one.summary["test_loss"]) < 1e-12
    for mine, other in zip(many.history.steps, one.history.steps, strict=True):
        assert abs(mine.loss - other.loss) < 1e-12


class Twice(nn.Module):
    """Uses a long layer, another one, and the first again; both are units, of equal parts.
    6-1050-1050-1050-3."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.once = nn.Linear(FEATURES, 1050), nn.Linear(1050, 1050)
        self.again, self.out = nn.Linear(1050, 1050), nn.Linear(1050, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.again(self.into(inputs)).tanh()
        scores: Tensor = self.out(self.again(self.once(values).tanh()).tanh())
        return scores


@pytest.mark.parametrize("backend", ["dure", "gloo"])
def test_a_long_layer_that_is_used_twice_is_gathered_as_often_by_ranks_without_examples(
    backend: Any,
) -> None:
    """Batches of 4 and 1 for 2 ranks, tests of 1. Before the order is learned its gradient is sent
    when that of one use is there, and the other one comes late."""
    task = small_task(n=5, model=Twice, test=examples(1, seed=1), dtype=torch.float32)
    stop = dure.Stop(steps=2)
    one = dure.train(task, dure.SingleWorker(4), stop=stop, seed=3)
    mesh = dure.Parallel(dure.Mesh(2), 4, 1, zero=3)
    for strategy in (dure.ZeRO(3, 4, prefetch=0), mesh):
        many = dure.train(task, strategy, dure.Processes(2, backend=backend), stop, seed=3)
        assert largest_difference(many, one) < 1e-5
        assert abs(many.summary["test_loss"] - one.summary["test_loss"]) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_pieces_and_clipping_are_those_of_data_parallel(stage: Stage) -> None:
    task, stop = small_task(optimizer=ADAM, clip_norm=0.2), dure.Stop(steps=6)
    mine = dure.train(task, dure.ZeRO(stage, 7, accumulate=3), dure.Processes(3), stop)
    other = dure.train(task, dure.DataParallel(7, accumulate=3), dure.Processes(3), stop)
    assert largest_difference(mine, other) < 1e-12


@pytest.mark.parametrize(("stage", "times"), [(1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("backend", ["dure", "gloo"])
def test_the_bytes_of_a_run_are_those_of_the_formula(
    stage: Stage, times: int, backend: Any
) -> None:
    ranks, steps = 3, 4
    run = dure.train(
        small_task(),
        dure.ZeRO(stage, 12),
        dure.Processes(ranks, backend=backend),
        dure.Stop(steps=steps),
    )
    chunk = -(-215 // ranks)  # one unit, which is one block: one element of padding
    tail = 1 + 3 * ranks + 6 + (1 if stage == 3 else 0)
    formula = steps * 8 * (ranks - 1) * (times * chunk + tail)
    assert [worker["bytes_sent"] for worker in run.summary["per_worker"]] == [formula] * ranks


class Odd(nn.Module):
    """Dropout, batch norm, and a buffer that is not kept: what a resumed run needs again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.Dropout(0.2), nn.Linear(12, CLASSES))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64), persistent=False)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        result: Tensor = self.body(self.norm(inputs)) * (1 + 0.01 * self.count)
        return result


def test_buffers_are_rank_0s_as_in_data_parallel() -> None:
    task, stop = small_task(model=Odd, optimizer=ADAM), dure.Stop(steps=5)
    expected = dure.train(task, dure.DataParallel(9), dure.Processes(2), stop)
    for stage in STAGES:
        run = dure.train(task, dure.ZeRO(stage, 9), dure.Processes(2), stop)
        assert largest_difference(run, expected) < 1e-12
        assert float(run.model.count) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(stage: Stage, tmp_path: Path) -> None:
    task, strategy = small_task(n=48, model=Odd, optimizer=ADAM), dure.ZeRO(stage, 12, unit_size=30)
    whole = dure.train(task, strategy, dure.Processes(3), dure.Stop(steps=8))
    dure.train(task, strategy, dure.Processes(3), dure.Stop(steps=4), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=8))
    assert same_bits(whole, resumed)
    assert torch.equal(whole.model.count, resumed.model.count)  # type: ignore[arg-type]
    assert resumed.summary["test_loss"] == whole.summary["test_loss"]
    assert resumed.summary["bytes_sent"] == whole.summary["bytes_sent"]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    task, out = small_task(optimizer=ADAM), tmp_path / "run"
    one = dure.train(task, dure.SingleWorker(9), stop=dure.Stop(steps=12))
    dure.train(task, dure.ZeRO(3, 9, unit_size=60), dure.Processes(3), dure.Stop(steps=4), out=out)
    for ranks, steps in ((2, 8), (1, 12)):
        config = json.loads((out / "config.json").read_text())
        config["world"]["ranks"] = ranks
        (out / "config.json").write_text(json.dumps(config))
        run = dure.resume(out, task=task, stop=dure.Stop(steps=steps))
    assert largest_difference(run, one) < 1e-12


def test_ranks_without_test_examples_take_part_in_evaluations() -> None:
    task = small_task(test=examples(2, seed=1))
    world = dure.Processes(3, backend="gloo")
    run = dure.train(
        task, dure.ZeRO(3, 9, unit_size=60), world, dure.Stop(steps=2), evaluate_every=1
    )
    one = dure.train(task, dure.SingleWorker(9), stop=dure.Stop(steps=2), evaluate_every=1)
    assert abs(run.summary["test_loss"] - one.summary["test_loss"]) < 1e-12


def test_a_loss_that_is_not_finite_ends_all_ranks() -> None:
    task = small_task(loss=lambda outputs, targets: outputs.sum() / 0)
    with pytest.raises(LossNotFiniteError, match="lower the learning rate"):
        dure.train(task, dure.ZeRO(3, 9), dure.Processes(2), dure.Stop(steps=50))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (dure.ZeRO(4, 8), "ZeRO has no stage 4; choose 1, 2 or 3"),  # type: ignore[arg-type]
        (dure.ZeRO(2, 1), "a joint batch of 1 cannot be divided over 2 workers"),
        (dure.ZeRO(2, 8, unit_size=0), "unit_size is 0, but it has to be 1 or more"),
        (dure.ZeRO(2, 8, prefetch=-1), "prefetch is -1"),
        (dure.ZeRO(2, 8, "rings"), "there is no way to send 'rings'"),  # type: ignore[arg-type]
        (dure.ZeRO(2, 8, accumulate=0), "accumulate is 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(strategy: dure.ZeRO, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dure.train(small_task(), strategy, dure.Processes(2), dure.Stop(steps=1))
