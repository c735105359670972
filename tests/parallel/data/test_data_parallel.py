"""Data parallel training in every odd case that users bring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.algorithms import master, ring
from dure.collectives.algorithms.table import ALL_REDUCES
from dure.collectives.compression import Compression, PowerSGD, TopK
from dure.parallel.data.strategy import elements_in_step
from small import CLASSES, EXAMPLES, FEATURES, largest_difference, network, same_bits, small_task

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
    elements = elements_in_step(run.summary["parameters"], 6, ranks)
    for rank, worker in enumerate(run.summary["per_worker"]):
        sent = formula.elements_sent(elements, ranks, rank)  # type: ignore[attr-defined]
        assert worker["bytes_sent"] == steps * 8 * sent


def test_a_loss_that_may_say_what_it_counts_sends_one_number_more() -> None:
    task = small_task(loss=lambda outputs, targets: F.cross_entropy(outputs, targets))
    run = dure.train(task, dure.DataParallel(8), dure.Processes(3), dure.Stop(steps=2))
    elements = elements_in_step(run.summary["parameters"], 6, 3, counts=1)
    for rank, worker in enumerate(run.summary["per_worker"]):
        assert worker["bytes_sent"] == 2 * 8 * ring.elements_sent(elements, 3, rank)


@pytest.mark.parametrize("algorithm", ["ring", "master", "native"])
def test_the_bytes_of_many_buckets_are_those_of_their_lengths(algorithm: str) -> None:
    ranks, steps, weights = 3, 4, [3, 24, 8, 96, 12, 72]
    strategy = dure.DataParallel(9, algorithm, bucket_bytes=1)  # type: ignore[arg-type]
    run = dure.train(small_task(), strategy, dure.Processes(ranks), dure.Stop(steps=steps))
    assert sum(weights) == run.summary["parameters"]
    tail = elements_in_step(0, len(weights), ranks, messages=len(weights))
    lengths = [*weights[:-1], weights[-1] + tail]
    for rank, worker in enumerate(run.summary["per_worker"]):
        sent = sum(ALL_REDUCES[algorithm].elements_sent(length, ranks, rank) for length in lengths)
        assert worker["bytes_sent"] == steps * 8 * sent


@pytest.mark.parametrize(
    "strategy",
    [
        dure.DataParallel(9, accumulate=2),
        dure.DataParallel(9, "native", accumulate=100, bucket_bytes=1),
        dure.DataParallel(9, "native", bucket_bytes=700, overlap="beside"),
        dure.DataParallel(9, "tree", bucket_bytes=1, overlap="after"),
        dure.DataParallel(9, compression=TopK(1.0), bucket_bytes=700),
        dure.DataParallel(9, compression=PowerSGD(12, min_compression=0), overlap="beside"),
    ],
    ids=lambda strategy: (
        f"{strategy.label} in {strategy.accumulate}, {strategy.bucket_bytes}, {strategy.overlap}"
    ),
)
def test_pieces_buckets_and_full_compression_walk_the_path_of_one_worker(
    strategy: dure.DataParallel,
) -> None:
    many = dure.train(small_task(), strategy, dure.Processes(3), STOP, seed=5)
    one = dure.train(small_task(), dure.SingleWorker(9), stop=STOP, seed=5)
    assert largest_difference(many, one) < (
        1e-10 if isinstance(strategy.compression, PowerSGD) else 1e-12
    )
    for mine, other in zip(many.history.steps, one.history.steps, strict=True):
        assert abs(mine.loss - other.loss) < 1e-10


class Clipped(torch.optim.SGD):
    """SGD that clips by the global norm by itself."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()


def test_the_norm_that_is_clipped_is_that_of_the_joint_gradient() -> None:
    many = dure.train(
        small_task(clip_norm=0.1), dure.DataParallel(9), dure.Processes(3), STOP, seed=5
    )
    task = small_task(optimizer=lambda parameters: Clipped(parameters, lr=0.3))
    one = dure.train(task, dure.SingleWorker(9), stop=STOP, seed=5)
    assert largest_difference(many, one) < 1e-12


def test_bf16_computes_roughly_and_keeps_weights_and_bits() -> None:
    runs = [
        dure.train(
            small_task(
                model=lambda: network(torch.float32), dtype=torch.float32, precision=precision
            ),
            dure.DataParallel(9),
            dure.Processes(3),
            STOP,
            seed=5,
        )
        for precision in ("bf16", "bf16", "full")
    ]
    assert same_bits(runs[0], runs[1])
    assert 0 < largest_difference(runs[0], runs[2]) < 0.05
    assert all(weight.dtype is torch.float32 for weight in runs[0].model.parameters())


@pytest.mark.parametrize("compression", [TopK(0.05), PowerSGD(1)], ids=str)
def test_a_compressed_run_goes_on_with_the_same_bits_from_what_every_rank_remembers(
    compression: Compression, tmp_path: Path
) -> None:
    strategy = dure.DataParallel(9, "native", bucket_bytes=700, compression=compression)
    whole = dure.train(small_task(), strategy, dure.Processes(3), dure.Stop(steps=8))
    assert strategy.label == f"data parallel {compression}"
    dure.train(small_task(), strategy, dure.Processes(3), dure.Stop(steps=4), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(steps=8))
    assert same_bits(whole, resumed)


class TakesTurns(nn.Module):
    """Its layers are used in another order in every other step, so that gradients finish in another
    order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Linear(FEATURES, FEATURES).double(),
            nn.Linear(FEATURES, FEATURES).double(),
        )
        self.out = nn.Linear(FEATURES, CLASSES).double()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        layers = [self.one, self.other, nn.Tanh()]
        if self.training:
            self.steps += 1
        for layer in layers if self.steps % 2 else layers[1::-1]:
            inputs = layer(inputs)
        result: Tensor = self.out(inputs)
        return result


def test_a_resumed_run_keeps_the_order_of_gradients_on_which_bits_of_a_ring_depend(
    tmp_path: Path,
) -> None:
    task, strategy = small_task(model=TakesTurns), dure.DataParallel(9, "ring", bucket_bytes=300)
    whole = dure.train(task, strategy, dure.Processes(3), dure.Stop(steps=7))
    dure.train(task, strategy, dure.Processes(3), dure.Stop(steps=3), out=tmp_path / "run")
    assert same_bits(whole, dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=7)))


def test_a_last_batch_with_fewer_examples_than_ranks_counts_as_it_should() -> None:
    assert EXAMPLES % 10 == 1
    many, one = both(small_task(), 10, ranks=4)
    assert largest_difference(many, one) < 1e-12
    assert [step.samples for step in many.history.steps] == [
        step.samples for step in one.history.steps
    ]
    for mine, other in zip(many.history.steps, one.history.steps, strict=True):
        assert abs(mine.loss - other.loss) < 1e-12


class Branches(nn.Module):
    """`sometimes` is used in some batches and on some ranks only, `never` in none; `frozen` has no
    gradient."""

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
    run = dure.train(
        small_task(n=40, model=Normed), dure.DataParallel(20), dure.Processes(2), dure.Stop(steps=1)
    )
    task = small_task(n=40)
    from dure.data.batches import Batches

    part = Batches(40, 20, 0).at(0).tensor_split(2)[0]
    seen = task.train.inputs[part]
    assert torch.allclose(run.model.norm.running_mean, 0.1 * seen.mean(dim=0))  # type: ignore[union-attr, arg-type, operator]
    assert run.model.norm.num_batches_tracked == 1  # type: ignore[union-attr]


def test_batch_norm_adds_a_broadcast_of_what_it_changed_to_the_bytes() -> None:
    ranks, steps = 3, 4
    run = dure.train(
        small_task(n=48, model=Normed),
        dure.DataParallel(12),
        dure.Processes(ranks),
        dure.Stop(steps=steps),
    )
    elements = elements_in_step(run.summary["parameters"], 4, ranks, buffers=3)
    changed = 8 * (FEATURES + FEATURES + 1)
    for rank, worker in enumerate(run.summary["per_worker"]):
        broadcast = changed * (ranks - 1) if rank == 0 else 0
        assert worker["bytes_sent"] == steps * (
            8 * ring.elements_sent(elements, ranks, rank) + broadcast
        )


class Odd(nn.Module):
    """Buffers of every kind: used in training, not persistent, expanded, of a dtype that gloo does
    not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("expanded", torch.arange(FEATURES).expand(1, -1))
        self.register_buffer("short", torch.ones(3, dtype=torch.int16))
        self.out = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * inputs.mean(dim=0))
            self.count += 1
        result: Tensor = self.out(inputs - self.mean) * (1 + 0.01 * self.count)
        return result


@pytest.mark.parametrize("evaluate_every", [1, 100])
def test_buffers_that_training_uses_are_the_same_whenever_it_is_evaluated_or_resumed(
    evaluate_every: int, tmp_path: Path
) -> None:
    task = small_task(model=Odd)
    whole = dure.train(task, dure.DataParallel(9), dure.Processes(3), dure.Stop(steps=10))
    half = dure.Stop(steps=5)
    out = tmp_path / "run"
    dure.train(
        task, dure.DataParallel(9), dure.Processes(3), half, out=out, evaluate_every=evaluate_every
    )
    resumed = dure.resume(out, task=task, stop=dure.Stop(steps=10))
    assert same_bits(whole, resumed)
    assert float(resumed.model.count) == 10  # type: ignore[arg-type]
    assert resumed.summary["test_loss"] == whole.summary["test_loss"]


def test_a_federation_with_passing_buffers_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    task = small_task(model=Odd)
    whole = dure.train(task, dure.FedAvg(clients=3), stop=dure.Stop(rounds=4))
    dure.train(task, dure.FedAvg(clients=3), stop=dure.Stop(rounds=2), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=4))
    assert same_bits(whole, resumed)
    assert torch.equal(whole.model.count, resumed.model.count)  # type: ignore[arg-type]


def test_sparse_gradients_of_embeddings_are_summed() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, CLASSES, sparse=True).double()

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.embedding(inputs.abs().long().clamp(max=6)[:, 0])
            return result

    many, one = both(small_task(model=Words), 8)
    assert largest_difference(many, one) < 1e-12


def test_half_precision_gradients_travel_beside_a_tail_in_float32() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 8, dtype=torch.bfloat16)
            self.second = nn.Linear(8, CLASSES, dtype=torch.bfloat16)

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(inputs)).float()
            return result

    task = small_task(model=Mixed, dtype=torch.bfloat16)
    run = dure.train(task, dure.DataParallel(8), dure.Processes(2), STOP)
    again = dure.train(task, dure.DataParallel(8), dure.Processes(2), STOP)
    assert same_bits(run, again)
    assert run.model.first.weight.dtype is torch.bfloat16  # type: ignore[union-attr]


def test_time_is_told_apart_and_every_rank_has_a_lane(tmp_path: Path) -> None:
    import json

    class Slow(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            import time

            if self.training and torch.distributed.get_rank() == 0:
                time.sleep(0.1)
            return super().forward(inputs)

    task = small_task(model=lambda: Slow(FEATURES, CLASSES).double())
    out = tmp_path / "run"
    run = dure.train(task, dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=10), out=out)
    slow, fast = run.summary["per_worker"]
    assert slow["compute_seconds"] > 1
    assert fast["idle_seconds"] > slow["idle_seconds"], "who waits for a slow peer is idle"
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes >= {"rank 0", "rank 1"}, "what is hidden has lanes of its own"
    assert {event.get("cat") for event in events} >= {"compute", "communication", "idle"}


@pytest.mark.parametrize(
    ("strategy", "ranks", "message"),
    [
        (dure.DataParallel(0), 2, "batch_size is 0"),
        (dure.DataParallel(4), 8, "a joint batch of 4 cannot be divided over 8 workers"),
        (dure.DataParallel(None), 50, "the run has 50 workers, but only 41 training examples"),
        (dure.DataParallel(8, "rings"), 2, "there is no all-reduce 'rings'"),  # type: ignore[arg-type]
        (dure.DataParallel(8, accumulate=0), 2, "accumulate is 0"),
        (dure.DataParallel(8, bucket_bytes=0), 2, "bucket_bytes is 0"),
        (dure.DataParallel(8, overlap="maybe"), 2, "overlap is 'maybe'"),  # type: ignore[arg-type]
        (dure.SingleWorker(8), 2, "SingleWorker has one worker, but the world has 2"),
        (dure.FedAvg(4), 2, "FedAvg does not run in Processes"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    strategy: object, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dure.train(small_task(), strategy, dure.Processes(ranks), STOP)  # type: ignore[arg-type]
