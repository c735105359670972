"""A pipeline of threads: the path of one worker, whatever the stages and micro-batches."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.errors import LossNotFiniteError, WorkerFailedError
from dure.parallel.threads.layers_per_core import LayersPerCoreLearner, elements_between_stages
from small import CLASSES, EXAMPLES, FEATURES, largest_difference, same_bits, small_task

STOP = dure.Stop(epochs=2)


def piped(
    task: dure.Task,
    batch_size: int | None = 8,
    microbatches: int = 3,
    stages: int = 2,
    stop: dure.Stop = STOP,
    **more: Any,
) -> dure.Run:
    return dure.train(
        task,
        dure.LayersPerCore(batch_size, microbatches, **more),
        dure.Threads(stages),
        stop,
        seed=5,
    )


def alone(task: dure.Task, batch_size: int | None = 8, stop: dure.Stop = STOP) -> dure.Run:
    return dure.train(task, dure.SingleWorker(batch_size), stop=stop, seed=5)


@given(st.integers(1, 5), st.integers(1, 9), st.one_of(st.none(), st.integers(1, EXAMPLES)))
@settings(max_examples=10)
def test_stages_and_micro_batches_walk_the_path_of_one_worker(
    stages: int, parts: int, batch: int | None
) -> None:
    stop = dure.Stop(epochs=1)
    many = piped(small_task(), batch, parts, stages, stop)
    one = alone(small_task(), batch, stop)
    assert largest_difference(many, one) < 1e-12
    for mine, other in zip(many.history.steps, one.history.steps, strict=True):
        assert abs(mine.loss - other.loss) < 1e-12


def test_measured_stages_compute_the_same_bits_as_counted_ones() -> None:
    assert same_bits(piped(small_task(), balance="measured"), piped(small_task()))


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def test_the_loss_is_that_of_the_joint_batch() -> None:
    task = small_task(loss=contrast, test=None)
    assert largest_difference(piped(task), alone(task)) < 1e-12


class Two(nn.Module):
    """Gives two tensors, one of them without a gradient."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden.argmax(1)


class One(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * (1 + pair[1][:, None])


def test_structures_and_layers_that_write_into_their_inputs_pass_from_stage_to_stage() -> None:
    def model() -> nn.Module:
        layers = [
            nn.Linear(FEATURES, 12),
            nn.ReLU(inplace=True),
            Two(),
            One(),
            nn.Linear(12, CLASSES),
        ]
        return nn.Sequential(*layers).double()

    task = small_task(model=model)
    for stages in (2, 3, 5):
        assert largest_difference(piped(task, stages=stages), alone(task)) < 1e-12


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 12),
        nn.Dropout(0.3),
        nn.BatchNorm1d(12),
        nn.Dropout(0.2),
        nn.Linear(12, CLASSES),
    ).double()


def test_dropout_is_the_same_whatever_the_stages_and_in_one_micro_batch_that_of_one_worker():
    task = small_task(model=dropping, n=40)
    assert same_bits(piped(task, 8, 2, 3), piped(task, 8, 2, 3))
    assert same_bits(piped(task, 8, 2, 3), piped(task, 8, 2, 2))
    assert same_bits(piped(task, 8, 2, 3), piped(task, 8, 2, 3, balance="measured"))
    assert same_bits(piped(task, 8, 1, 3), alone(task))
    assert same_bits(piped(task, 8, 1, 1), alone(task))
    assert not same_bits(piped(task, 8, 2, 3), alone(task))


def test_stages_on_other_devices_draw_other_numbers() -> None:
    found: dict[torch.device, list[int]] = {}

    def program(context: RankContext) -> None:
        with context.ending:
            learner = LayersPerCoreLearner(
                small_task(model=dropping), context, 5, dure.LayersPerCore(8, 2)
            )
        cpu, first, second = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
        learner.chain.devices = [cpu, first, second, first]
        seeds = learner._draws(2, lambda seed: seed)  # type: ignore[arg-type, return-value]
        found.update(zip(learner.chain.devices, seeds, strict=True))  # type: ignore[arg-type]
        assert seeds[1] is seeds[3]

    dure.Threads(4).run(program, lambda event: None)
    assert len(set(itertools.chain.from_iterable(found.values()))) == 6


def test_the_meters_count_what_stages_hand_over() -> None:
    steps = 4
    batch = 8
    run = piped(small_task(), batch, 3, 3, dure.Stop(steps=steps))
    names = [one["name"] for one in run.summary["per_worker"]]
    assert names == ["master", "stage 0, layers 0-1", "stage 1, layer 2", "stage 2, layers 3-4"]
    expected = [8 * steps * count for count in elements_between_stages([12, 8], batch)]
    assert [one["bytes_sent"] for one in run.summary["per_worker"]] == [0, *expected]
    assert sum(one["bytes_received"] for one in run.summary["per_worker"]) == sum(expected)
    assert run.summary["workers"] == 3
    assert all(
        one["compute_seconds"] > 0 and one["idle_seconds"] > 0 for one in run.summary["per_worker"]
    )


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    task = small_task(model=dropping, n=40, optimizer=partial(torch.optim.Adam, lr=0.01))
    strategy = dure.LayersPerCore(8, 2)
    world = dure.Threads(2)
    dure.train(task, strategy, world, dure.Stop(steps=3), seed=5, out=tmp_path)
    assert same_bits(dure.resume(tmp_path, task=task, stop=STOP), piped(task, 8, 2))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_of_a_stage_names_it_and_the_step_and_nobody_waits_for_it(stage: int) -> None:
    class Broken(nn.Linear):
        calls = 0

        def forward(self, hidden: Tensor) -> Tensor:
            if self.training and threading.current_thread().name == f"dure stage {stage}":
                Broken.calls += 1
                if Broken.calls == 5:
                    raise ZeroDivisionError("my own mistake")
            return super().forward(hidden)

    sizes = ((FEATURES, 12), (12, 8), (8, CLASSES))
    task = small_task(model=lambda: nn.Sequential(*(Broken(n, m) for n, m in sizes)).double())
    with pytest.raises(
        WorkerFailedError,
        match=f"stage {stage} failed in step 2: ZeroDivisionError: my own mistake",
    ):
        piped(task, stages=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dure stage")]


def test_a_loss_that_is_not_finite_names_the_step() -> None:
    task = small_task(
        loss=lambda outputs, targets: (
            F.cross_entropy(outputs, targets) / (not outputs.requires_grad)
        )
    )
    with pytest.raises(LossNotFiniteError, match="the loss is inf at step 1"):
        piped(task)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (dure.LayersPerCore(8, 0), "microbatches is 0"),
        (dure.LayersPerCore(8, balance="guessed"), "there is no balance 'guessed'"),  # type: ignore[arg-type]
    ],
)
def test_fields_that_make_no_sense_are_refused(
    strategy: dure.LayersPerCore, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        dure.train(small_task(), strategy, dure.Threads(2))
