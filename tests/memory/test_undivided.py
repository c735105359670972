"""Ranks that hold parts: the undivided model lies in files, and training has the same bits."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import unused_copy
from dure.contracts.strategy import Strategy
from dure.contracts.world import RankContext
from dure.machine.limits import RemainingMemory
from dure.memory import file_backed_init
from dure.memory import mapped as mapping
from dure.memory.file_backed_init import (
    in_files,
    in_files_like,
    lies_in_files,
    move_to_memory,
    tensors_of,
)
from dure.memory.mapped import Disk, DiskError, is_mapped, mapped
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.pipeline.cut import release_tensors
from dure.run.run_model import RunModel
from dure.run.train import prepare

WIDTH = 384
SYSTEMS: dict[str, Strategy] = {
    "tensor": dure.TensorParallel(batch_size=8, plan="up=Column(); down=Row()"),
    "pipeline": dure.Pipeline(batch_size=8, microbatches=2),
    "zero": dure.ZeRO(stage=3, batch_size=8),
    "mesh": dure.Parallel(mesh=Mesh(data=2), batch_size=8, microbatches=1, zero=3),
}


class Network(nn.Module):
    """With a layer that is divided, and one that is not; a buffer is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("shift", torch.rand(3 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.relu(self.up(x)))
        return F.linear(self.scores(x), self.shift.t()[:, : 3 * WIDTH])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    # One that makes its state when it is made.
    return torch.optim.Adagrad(parameters, lr=0.01)


inputs = torch.rand(16, WIDTH, generator=torch.Generator().manual_seed(1))
TASK = dure.Task(
    model=Network,
    loss=F.cross_entropy,
    train=(inputs, torch.arange(16) % 10),
    optimizer=optimizer,
)


def on_both_ways(context: RankContext) -> dict[str, list[tuple[str, float]]]:
    """For each system: digests of the weights after two steps, made in memory and in files; and how
    many files were left when the learner was made, on any rank."""
    found: dict[str, list[tuple[str, float]]] = {}
    for name, strategy in SYSTEMS.items():
        found[name] = []
        for divided in (False, True):
            context.prepared = RunModel(TASK, 0, None, divided=divided).take
            learner = strategy.learner(TASK, context, 0)
            left = context.group.all_gather_values([float(len(mapping._segments))])
            for _ in range(2):
                learner.advance(0)
            digest = hashlib.sha256()
            for value in learner.weights().values():
                digest.update(value.numpy().tobytes())
            found[name].append((digest.hexdigest(), sum(one for (one,) in left)))
            del learner
    return found


def test_learners_take_parts_of_a_model_in_files_and_train_to_the_same_bits() -> None:
    found = dure.Processes(2).run(on_both_ways, lambda event: None)
    for name, ((memory, _), (files, left)) in found.items():
        assert memory == files, name
        assert left == 0, f"{name}: what a rank keeps has moved into memory, and the rest has gone"


def test_the_process_that_waits_has_its_model_in_files_unless_it_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = SYSTEMS["pipeline"]
    small = dure.train(TASK, strategy, dure.Processes(2), dure.Stop(steps=1))
    assert not lies_in_files(small.model)
    # With so much free, it is not.
    weights = sum(one.nbytes for one in tensors_of(small.model))
    room = RemainingMemory(
        file_backed_init._SMALL * weights // 2, 0, "what this test leaves", shared=True
    )
    monkeypatch.setattr(file_backed_init, "remaining_memory", lambda: [room])
    world = dure.Processes(2)
    job, _ = prepare(TASK, strategy, world, dure.Stop(steps=1), 0)
    assert job.fresh is not None
    assert lies_in_files(job.fresh._untouched())
    run = dure.train(TASK, strategy, world, dure.Stop(steps=1))
    assert lies_in_files(run.model)
    first = next(run.model.parameters())
    assert not is_mapped(first), "what there is room for is in memory"
    alone = dure.train(TASK, dure.SingleWorker(8), stop=dure.Stop(steps=1))
    assert not lies_in_files(alone.model)
    both = zip(run.model.parameters(), small.model.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in both)
    for mine, other in zip(run.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_without_a_disk_the_model_lies_in_memory_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoDisk:
        def __init__(self) -> None:
            raise DiskError("none of /tmp is a folder on a disk: set TMPDIR to one")

    monkeypatch.setattr(file_backed_init, "Disk", NoDisk)
    job, _ = prepare(TASK, SYSTEMS["pipeline"], dure.Processes(2), dure.Stop(steps=1), 0)
    assert job.fresh is not None
    assert not lies_in_files(job.fresh._untouched())
    assert job.proofs[0].what == (
        "every rank holds the whole model in memory: none of /tmp is a folder on a disk: "
        "set TMPDIR to one"
    )


def test_on_a_disk_that_becomes_full_the_model_is_made_again_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = iter([Disk.place])

    def place(disk: Disk, tensor: torch.Tensor, values: bool = True) -> torch.Tensor:
        for way in places:
            return way(disk, tensor, values)
        raise DiskError("0.1 GB do not fit")

    monkeypatch.setattr(Disk, "place", place)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Network()

    found = in_files(make)
    assert not lies_in_files(found)
    assert torch.equal(found.up.weight, make().up.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("strategy", "workers", "parts"),
    [
        (dure.TensorParallel(), 2, True),
        (dure.TensorParallel(), 1, False),
        (dure.Pipeline(), 2, True),
        (dure.Pipeline(), 1, False),
        (dure.ZeRO(stage=3), 2, True),
        (dure.ZeRO(stage=3), 1, False),
        (dure.ZeRO(stage=2), 2, False),
        (dure.Parallel(mesh=Mesh(data=2)), 2, False),
        (dure.Parallel(mesh=Mesh(data=2), zero=3), 2, True),
        (dure.DataParallel(), 2, False),
        (dure.FedAvg(), None, False),
    ],
)
def test_which_systems_hold_parts(strategy: Strategy, workers: int | None, parts: bool) -> None:
    assert strategy.holds_parts(workers) == parts


def test_a_copy_lies_where_its_model_lies() -> None:
    with mapped(Disk()):
        model = Network()
    assert lies_in_files(unused_copy(model, TASK, 0))
    assert not lies_in_files(unused_copy(Network(), TASK, 0))
    with in_files_like(model):
        assert is_mapped(model.up.weight * 2)


def test_what_is_brought_stays_what_it_was() -> None:
    with mapped(Disk()):
        model = Network()
        model.scores.weight = nn.Parameter(model.up.weight.detach().t().contiguous().t())
        alias = model.down.weight.data.t()
    before = [(id(one), one.stride(), one.detach().clone()) for one in tensors_of(model)]
    move_to_memory([*tensors_of(model), alias])
    assert not lies_in_files(model)
    for one, (name, stride, value) in zip(tensors_of(model), before, strict=True):
        assert (id(one), one.stride()) == (name, stride)
        assert torch.equal(one, value)
        assert one.untyped_storage().nbytes() == one.nbytes
    # What lay in one piece of memory does so again.
    alias[3, 5] = 7
    assert model.down.weight[5, 3] == 7


def test_parameters_that_were_let_go_of_take_one_stretch_of_addresses() -> None:
    model = Network()
    model.scores.weight = nn.Parameter(model.scores.weight.detach().t().contiguous().t())
    shapes = [(one.shape, one.stride()) for one in tensors_of(model)]
    release_tensors(
        model, [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    )
    assert [(one.shape, one.stride()) for one in tensors_of(model)] == shapes
    assert not any(one.any() for one in tensors_of(model))
    assert len({one.data_ptr() for one in model.parameters()}) == 1
    # A pass may write into a buffer, which is no affair of the others.
    model.shift += 1
    assert not model.up.weight.any()
