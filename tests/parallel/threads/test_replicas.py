"""Data parallel in threads: the path of one worker, and what the master hands over."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.errors import LossNotFiniteError, WorkerFailedError
from dure.parallel.threads.replicas import elements_with_master, refresh, replica
from dure.run.registry import decode_strategy
from small import CLASSES, EXAMPLES, FEATURES, examples, largest_difference, same_bits, small_task

STOP = dure.Stop(epochs=2)


def in_threads(
    task: dure.Task, batch_size: int | None = 8, workers: int = 3, stop: dure.Stop = STOP
) -> dure.Run:
    return dure.train(task, dure.DataParallel(batch_size), dure.Threads(workers), stop, seed=5)


def alone(task: dure.Task, batch_size: int | None = 8, stop: dure.Stop = STOP) -> dure.Run:
    return dure.train(task, dure.SingleWorker(batch_size), stop=stop, seed=5)


def in_processes(task: dure.Task, batch_size: int | None = 8, workers: int = 2) -> dure.Run:
    return dure.train(task, dure.DataParallel(batch_size), dure.Processes(workers), STOP, seed=5)


@given(st.integers(1, 6), st.one_of(st.none(), st.integers(6, EXAMPLES)))
@settings(max_examples=15)
def test_threads_walk_the_path_of_one_worker(workers: int, batch_size: int | None) -> None:
    stop = dure.Stop(epochs=2)
    many = in_threads(small_task(), batch_size, workers, stop)
    one = alone(small_task(), batch_size, stop)
    assert largest_difference(many, one) < 1e-12
    for mine, other in zip(many.history.steps, one.history.steps, strict=True):
        assert abs(mine.loss - other.loss) < 1e-12
        assert mine.samples == other.samples


def test_a_last_batch_smaller_than_the_workers_leaves_some_of_them_out() -> None:
    assert EXAMPLES % 10 == 1
    assert largest_difference(in_threads(small_task(), 10, 4), alone(small_task(), 10)) < 1e-12


class Structured(nn.Module):
    """Takes a dict; returns a tuple of a dict, whole numbers without a gradient, and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES).double()
        self.second = nn.Linear(FEATURES, 2).double()

    def forward(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, str]:
        scores = self.first(inputs["x"])
        return {"scores": scores, "other": self.second(inputs["y"])}, scores.argmax(1), "done"


def structured_loss(outputs: Any, targets: Tensor) -> Tensor:
    values, chosen, word = outputs
    assert word == "done"
    assert len(chosen) == len(targets)
    return F.cross_entropy(values["scores"], targets) + values["other"].square().mean()


def test_models_may_take_and_return_structures() -> None:
    data = examples()
    task = small_task(
        model=Structured,
        loss=structured_loss,
        train=dure.Examples({"x": data.inputs, "y": data.inputs * 2}, data.targets),
        test=None,
    )
    assert largest_difference(in_threads(task), alone(task)) < 1e-12


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every example against all the others of the batch."""
    likeness = outputs @ outputs.T
    return (
        F.cross_entropy(likeness, torch.arange(len(outputs))) + (outputs.mean(0) - 1).square().sum()
    )


def test_the_loss_may_be_any_function_of_the_whole_batch() -> None:
    task = small_task(loss=contrast, test=None)
    assert largest_difference(in_threads(task), alone(task)) < 1e-12


class Branches(nn.Module):
    """Some workers use `sometimes`, none `never`; `frozen` has no gradient; `tied` is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never, self.frozen, self.tied = (
            nn.Linear(FEATURES, CLASSES).double() for _ in range(5)
        )
        self.frozen.requires_grad_(False)
        self.tied.weight = self.always.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.always(inputs) + self.frozen(inputs) + self.tied(inputs)
        chosen = inputs[:, 0] > 1
        if chosen.any():
            outputs = outputs + torch.where(chosen[:, None], self.sometimes(inputs), 0.0)
        return outputs


def test_unused_frozen_and_tied_parameters_move_as_with_one_worker() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, momentum=0.9)
    task = small_task(model=Branches, optimizer=optimizer)
    assert largest_difference(in_threads(task, 6), alone(task, 6)) < 1e-12


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, CLASSES, sparse=sparse).double()

    def forward(self, indices: Tensor) -> Tensor:
        return self.words(indices).sum(1)


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_and_their_sparse_gradients_are_added(sparse: bool) -> None:
    indices = torch.randint(0, 50, (40, 4), generator=torch.Generator().manual_seed(1))
    task = small_task(
        model=lambda: Words(sparse), train=(indices, indices[:, 0] % CLASSES), test=None
    )
    assert largest_difference(in_threads(task), alone(task)) < 1e-12


class Random(nn.Module):
    """Dropout, and noise from an operator that takes no generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16).double()
        self.second = nn.Linear(16, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.dropout(self.first(inputs), 0.4, self.training)
        noise = torch.rand_like(hidden) if self.training else 0
        scores: Tensor = self.second(hidden + noise)
        return scores


def test_each_worker_draws_what_the_rank_of_its_number_draws() -> None:
    task = small_task(model=Random)
    assert largest_difference(in_threads(task, workers=2), in_processes(task)) < 1e-12
    assert largest_difference(in_threads(task, workers=1), alone(task)) < 1e-12
    assert same_bits(in_threads(task, workers=4), in_threads(task, workers=4))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).double()
        self.out = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.out(F.dropout(self.norm(inputs), 0.2, self.training))
        return scores


def test_batch_norm_sees_a_workers_part_and_keeps_worker_0s_statistics() -> None:
    """As ranks do: a pass that is done twice, since the model draws, changes no statistics."""
    task = small_task(model=Normed, train=examples(40))
    assert largest_difference(in_threads(task, workers=2), in_processes(task)) < 1e-12


def test_an_optimizer_that_puts_weights_elsewhere_is_followed() -> None:
    class Rebinding(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for weight in self.param_groups[0]["params"]:
                weight.data = weight.data - 0.1 * weight.grad

    task = small_task(optimizer=partial(Rebinding, lr=0.1))
    assert largest_difference(in_threads(task), alone(task)) < 1e-12


def test_the_meters_count_what_is_handed_over() -> None:
    workers = 3
    batch = 8
    steps = 5
    run = in_threads(small_task(), batch, workers, dure.Stop(steps=steps))
    down, up = elements_with_master(
        batch * FEATURES, batch * CLASSES, run.summary["parameters"], workers
    )
    master, *rest = run.summary["per_worker"]
    assert [one["name"] for one in run.summary["per_worker"]] == [
        "master",
        "worker 0",
        "worker 1",
        "worker 2",
    ]
    assert (master["bytes_sent"], master["bytes_received"]) == (8 * steps * down, 8 * steps * up)
    assert sum(one["bytes_received"] for one in rest) == master["bytes_sent"]
    assert sum(one["bytes_sent"] for one in rest) == master["bytes_received"]
    assert run.summary["workers"] == workers
    assert run.summary["bytes_sent_per_worker"] == master["bytes_received"] / workers
    for one in rest:
        assert one["compute_seconds"] > 0
        assert one["idle_seconds"] > 0
    assert all(
        master[kind] > 0 for kind in ("compute_seconds", "communication_seconds", "idle_seconds")
    )


def test_replicas_use_the_weights_where_they_are() -> None:
    model = Normed()
    fresh = replica(model, Normed(), torch.device("cpu"))
    assert all(
        a.data_ptr() == b.data_ptr()
        for a, b in zip(model.parameters(), fresh.parameters(), strict=True)
    )
    assert refresh(model, model) == 0
    model.norm.running_mean += 1
    assert refresh(fresh, model) == sum(buffer.nbytes for buffer in model.buffers())
    assert torch.equal(fresh.norm.running_mean, model.norm.running_mean)
    with pytest.raises(ValueError, match="returned the same parameters twice"):
        replica(model, model, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_walk_the_path_of_one_worker() -> None:
    world = dure.Threads(2, ("cuda:0", "cuda:1"))
    many = dure.train(small_task(), dure.DataParallel(8), world, STOP, seed=5)
    assert largest_difference(many, alone(small_task())) < 1e-10


@pytest.mark.parametrize("stop", [dure.Stop(steps=9), dure.Stop(epochs=2)])
def test_a_resumed_run_has_the_same_bits(tmp_path: Any, stop: dure.Stop) -> None:
    task = small_task(
        model=Normed, train=examples(40), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    strategy = dure.DataParallel(8)
    world = dure.Threads(2)
    whole = dure.train(task, strategy, world, stop, seed=5)
    dure.train(task, strategy, world, dure.Stop(steps=4), seed=5, out=tmp_path)
    resumed = dure.resume(tmp_path, task=task, stop=stop)
    assert same_bits(whole, resumed)
    names = [one["name"] for one in resumed.summary["per_worker"]]
    assert names == ["master", "worker 0", "worker 1"]
    assert resumed.summary["bytes_sent"] == whole.summary["bytes_sent"]


def test_an_error_of_a_replica_names_worker_and_step_once_and_leaves_no_thread() -> None:
    class Broken(nn.Linear):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
                if self.calls == 3 and threading.current_thread().name == "dure worker 1":
                    raise ZeroDivisionError("my own mistake")
            return super().forward(inputs)

    task = small_task(model=lambda: Broken(FEATURES, CLASSES).double())
    with pytest.raises(WorkerFailedError) as caught:
        in_threads(task, workers=2)
    assert str(caught.value) == "worker 1 failed in step 3: ZeroDivisionError: my own mistake"
    assert "raise ZeroDivisionError" in caught.value.traceback
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dure worker")]


def test_a_loss_that_is_not_finite_names_the_step() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) / (0 if outputs.requires_grad else 1)

    with pytest.raises(LossNotFiniteError, match="the loss is inf at step 1 on master"):
        in_threads(small_task(loss=loss))


class Mean(nn.Module):
    """Returns one number for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).mean()


def test_outputs_that_cannot_be_put_together_are_said() -> None:
    task = small_task(model=Mean, loss=lambda outputs, targets: outputs, test=None)
    with pytest.raises(WorkerFailedError, match="the first dimension has to be the examples"):
        in_threads(task)


def test_the_norm_of_gradients_is_clipped_as_by_ranks() -> None:
    strategy = dure.DataParallel(8)
    runs = [
        dure.train(small_task(clip_norm=0.1), strategy, world, STOP, seed=5)
        for world in (dure.Threads(2), dure.Processes(2))
    ]
    assert largest_difference(*runs) < 1e-12
    assert largest_difference(runs[0], alone(small_task())) > 1e-3


def test_bf16_is_that_of_ranks() -> None:
    data = examples()
    task = small_task(
        model=lambda: nn.Linear(FEATURES, CLASSES),
        train=(data.inputs.float(), data.targets),
        test=None,
    )
    strategy = dure.DataParallel(8)
    runs = [
        dure.train(replace(task, precision="bf16"), strategy, world, STOP, seed=5)
        for world in (dure.Threads(2), dure.Processes(2))
    ]
    assert largest_difference(*runs) < 1e-4
    assert largest_difference(runs[0], in_threads(task)) > 1e-4


@pytest.mark.parametrize(
    "field", [{"compression": "top-k:0.1"}, {"accumulate": 2}, {"all_reduce": "tree"}]
)
def test_fields_about_messages_are_refused_where_nothing_is_sent(field: dict[str, Any]) -> None:
    strategy = decode_strategy({"name": "data-parallel", **field})
    with pytest.raises(ValueError, match=f"in threads DataParallel cannot use {next(iter(field))}"):
        dure.train(small_task(), strategy, dure.Threads(2))


def test_more_workers_than_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="a joint batch of 2 cannot be divided over 3 workers"):
        in_threads(small_task(), 2)


def test_mixed_precision_of_the_caller_holds_in_the_workers() -> None:
    task = small_task(
        model=lambda: nn.Linear(FEATURES, CLASSES),
        train=(examples().inputs.float(), examples().targets),
    )
    seen: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return F.cross_entropy(outputs.float(), targets)

    with torch.autocast("cpu", torch.bfloat16):
        dure.train(
            small_task(model=task.model, loss=loss, train=task.train, test=None),
            dure.DataParallel(8),
            dure.Threads(2),
            dure.Stop(steps=1),
        )
    assert seen == [torch.bfloat16]
