"""Data parallel training in every odd case that users bring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.collectives import master, ring
from dure.parallel.data import elements_in_message
from small import CLASSES, EXAMPLES, FEATURES, largest_difference, same_bits, small_task

STOP = dure.Stop(epochs=2)


def both(task: dure.Task, batch_size: int | None, ranks: int = 3) -> tuple[dure.Run, dure.Run]:
    """The same task on many ranks and on one."""
    many = dure.train(task, dure.DataParallel(batch_size), dure.Processes(ranks), STOP, seed=5)
    return many, dure.train(task, dure.SingleWorker(batch_size), stop=STOP, seed=5)


@pytest.mark.parametrize(("algorithm", "formula"), [("ring", ring), ("master", master)])
def test_the_bytes_of_a_run_are_those_of_the_formula(algorithm: str, formula: object) -> None:
    ranks, steps = 3, 7
    strategy = dure.DataParallel(8, algorithm)  # type: ignore[arg-type]
    run = dure.train(small_task(), strategy, dure.Processes(ranks), dure.Stop(steps=steps))
    elements = elements_in_message(run.summary["parameters"], 6, ranks)
    for rank, worker in enumerate(run.summary["per_worker"]):
        sent = formula.elements_sent(elements, ranks, rank)  # type: ignore[attr-defined]
        assert worker["bytes_sent"] == steps * 8 * sent


def test_a_last_batch_with_fewer_examples_than_ranks_counts_as_it_should() -> None:
    assert EXAMPLES % 10 == 1
    many, one = both(small_task(), 10, ranks=4)
    assert largest_difference(many, one) < 1e-12
    assert [step.samples for step in many.history.steps] == [step.samples for step in one.history.steps]
    for mine, other in zip(many.history.steps, one.history.steps, strict=True):
        assert abs(mine.loss - other.loss) < 1e-12


class Branches(nn.Module):
    """`sometimes` is used in some batches and on some ranks only, `never` in none; `frozen` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(FEATURES, CLASSES)
        self.sometimes = nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(FEATURES, CLASSES)
        self.frozen = nn.Linear(FEATURES, CLASSES)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(FEATURES, CLASSES)
        self.tied.weight = self.always.weight
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.always(inputs) + self.frozen(inputs) + self.tied(inputs)
        chosen = inputs[:, 0] > 1
        if chosen.any():
            outputs = outputs + torch.where(chosen[:, None], self.sometimes(inputs), 0.0)
        return outputs


def test_unused_frozen_and_tied_parameters_move_as_on_one_worker() -> None:
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)  # noqa: E731
    many, one = both(small_task(model=Branches, optimizer=optimizer), 6)
    assert largest_difference(many, one) < 1e-12
    untouched = Branches()
    assert many.model.state_dict().keys() == untouched.state_dict().keys()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.out = nn.Linear(FEATURES, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.norm(inputs))
        return result


def test_buffers_in_the_result_are_those_of_rank_0() -> None:
    run = dure.train(small_task(n=40, model=Normed), dure.DataParallel(20), dure.Processes(2), dure.Stop(steps=1))
    task = small_task(n=40)
    from dure.data.batches import Batches

    part = Batches(40, 20, 0).at(0).tensor_split(2)[0]
    seen = task.train.inputs[part]
    assert torch.allclose(run.model.norm.running_mean, 0.1 * seen.mean(dim=0))  # type: ignore[union-attr, arg-type, operator]
    assert run.model.norm.num_batches_tracked == 1  # type: ignore[union-attr]


def test_half_precision_gradients_travel_beside_a_tail_in_float32() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 8, dtype=torch.bfloat16)
            self.second = nn.Linear(8, CLASSES, dtype=torch.bfloat16)

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(inputs)).float()
            return result

    run = dure.train(small_task(model=Mixed), dure.DataParallel(8), dure.Processes(2), STOP)
    again = dure.train(small_task(model=Mixed), dure.DataParallel(8), dure.Processes(2), STOP)
    assert same_bits(run, again)
    assert run.model.first.weight.dtype is torch.bfloat16  # type: ignore[union-attr]


def test_time_is_told_apart_and_every_rank_has_a_lane(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import json

    class Slow(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            import time

            if self.training and torch.distributed.get_rank() == 0:
                time.sleep(0.02)
            return super().forward(inputs)

    task = small_task(model=lambda: Slow(FEATURES, CLASSES).double())
    out = tmp_path / "run"
    run = dure.train(task, dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=10), out=out)
    slow, fast = run.summary["per_worker"]
    assert slow["compute_seconds"] > 0.2
    assert fast["idle_seconds"] > 0.1 > slow["idle_seconds"], "who waits for a slow peer is idle"
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"rank 0", "rank 1"}
    assert {event.get("cat") for event in events} >= {"compute", "communication", "idle"}


@pytest.mark.parametrize(
    ("strategy", "ranks", "message"),
    [
        (dure.DataParallel(0), 2, "batch_size is 0"),
        (dure.DataParallel(4), 8, "a joint batch of 4 cannot be divided over 8 workers"),
        (dure.DataParallel(None), 50, "50 workers are more than the 41 training examples"),
        (dure.DataParallel(8, "rings"), 2, "there is no all-reduce 'rings'"),  # type: ignore[arg-type]
        (dure.SingleWorker(8), 2, "SingleWorker is one worker, but the world has 2"),
        (dure.FedAvg(4), 2, "FedAvg does not live in Processes"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(strategy: object, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dure.train(small_task(), strategy, dure.Processes(ranks), STOP)  # type: ignore[arg-type]
