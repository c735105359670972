"""What trains on torch.distributed trains on dure unchanged, with the result it has on gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

# which torch's wrappers import on their first use: here, so that the fork server does it for all
# ranks
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from harness import need
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.worlds.processes.fork_server import server

cloudpickle.register_pickle_by_value(sys.modules[__name__])
server.preload(
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)

Results = list[Tensor]
Program = Callable[[], Results]


def same_on_both(program: Program, ranks: int = 2, tolerance: float = 0.0) -> None:
    """Runs on gloo, then on dure; rank 0's results have the same bits, or differ by no more than
    `tolerance`."""
    need("torch")
    gloo, ours = (
        dure.Processes(ranks, 60, backend=backend).run(
            partial(on_rank, program), lambda event: None
        )  # type: ignore[arg-type]
        for backend in ("gloo", "dure")
    )
    assert len(gloo) == len(ours) > 0
    for number, (one, other) in enumerate(zip(gloo, ours, strict=True)):
        assert bool(one.isfinite().all())
        assert torch.allclose(other, one, tolerance, tolerance), (
            f"result {number}: {other}, not {one}"
        )


def on_rank(program: Program, context: RankContext) -> Results:
    torch.manual_seed(0)
    return [result.detach().clone() for result in program()]


class Net(nn.Module):
    """Small, with a buffer, and with layers that tensor parallelism can split."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.relu(self.norm(self.first(inputs))))
        return outputs


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, own: bool = True
) -> None:
    """A few steps; own: every rank has data of its own."""
    for step in range(steps):
        inputs, targets = batch(step, dist.get_rank() if own else 0)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def state(model: nn.Module) -> Results:
    return list(model.state_dict().values())


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_distributed_data_parallel(options: dict[str, Any]) -> None:
    def program() -> Results:
        model = nn.parallel.DistributedDataParallel(Net(), **options)
        learn(model, sgd(model))
        return state(model)

    same_on_both(program)


def test_distributed_data_parallel_on_three_ranks() -> None:
    def program() -> Results:
        model = nn.parallel.DistributedDataParallel(Net())
        learn(model, sgd(model))
        return state(model)

    same_on_both(program, 3, 1e-5)


def test_distributed_data_parallel_accumulates_and_compresses() -> None:
    def program() -> Results:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model = nn.parallel.DistributedDataParallel(Net())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        optimizer = sgd(model)
        with model.no_sync():
            F.cross_entropy(model(batch(9, dist.get_rank())[0]), batch(9)[1]).backward()
        F.cross_entropy(model(batch(8, dist.get_rank())[0]), batch(8)[1]).backward()
        optimizer.step()
        return state(model)

    same_on_both(program)


def test_distributed_data_parallel_with_inputs_of_different_lengths() -> None:
    def program() -> Results:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
        optimizer = sgd(model)
        with model.join():
            learn(model, optimizer, steps=3 + 2 * dist.get_rank())
        return state(model)

    same_on_both(program)


def test_an_optimizer_whose_state_is_divided() -> None:
    def program() -> Results:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.parallel.DistributedDataParallel(Net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        learn(model, optimizer)
        return state(model)

    same_on_both(program)


@pytest.mark.parametrize("ranks", [2, 3])
def test_fully_sharded_data_parallel(ranks: int) -> None:
    def program() -> Results:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        model = Net()
        for layer in (model.first, model.second):
            fully_shard(layer)
        fully_shard(model)
        learn(model, sgd(model))
        return [
            value.full_tensor() if isinstance(value, DTensor) else value for value in state(model)
        ]

    same_on_both(program, ranks, 0.0 if ranks == 2 else 1e-5)


def test_distributed_tensors_change_their_placement() -> None:
    def program() -> Results:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        whole = torch.arange(30.0).view(6, 5)
        results = []
        for begin in (
            (Shard(0), Shard(1)),
            (Shard(1), Replicate()),
            (Replicate(), Shard(0)),
            (Shard(0), Shard(0)),
        ):
            tensor = distribute_tensor(whole, mesh, begin)
            for end in ((Replicate(), Replicate()), (Shard(1), Shard(0)), (Shard(0), Replicate())):
                results.append(tensor.redistribute(mesh, end).full_tensor())
        product = distribute_tensor(whole, mesh, (Shard(0), Replicate())) @ distribute_tensor(
            whole.t().contiguous(), mesh, (Replicate(), Replicate())
        )
        results.append(product.full_tensor())
        partial_sum = distribute_tensor(whole, mesh, (Replicate(), Replicate())).sum()
        results.append(partial_sum.full_tensor())
        line = init_device_mesh("cpu", (4,))
        from torch.distributed.tensor import DTensor

        part = DTensor.from_local(torch.ones(8, 2) * (dist.get_rank() + 1), line, [Partial()])
        results += [part.redistribute(line, [Shard(0)]).full_tensor(), part.full_tensor()]
        return results

    same_on_both(program, 4)


def test_tensor_parallel() -> None:
    def program() -> Results:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        learn(model, sgd(model), own=False)
        return [
            value.full_tensor() if isinstance(value, DTensor) else value for value in state(model)
        ]

    same_on_both(program)


def test_sequence_parallel_with_data_parallel() -> None:
    def program() -> Results:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(),
        }
        parallelize_module(
            model,
            mesh["tensor"],
            PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)),
        )
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        learn(model, sgd(model), own=False)
        return [
            value.full_tensor() if isinstance(value, DTensor) else value for value in state(model)
        ]

    same_on_both(program, 4, 1e-6)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_of_two_stages(name: str) -> None:
    def program() -> Results:
        from torch.distributed import pipelining

        rank = dist.get_rank()
        layers = [nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)]
        stage = pipelining.PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
        schedule = getattr(pipelining, name)(stage, 4, loss_fn=F.cross_entropy)
        optimizer = sgd(layers[rank])
        for step in range(2):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=[])
            optimizer.step()
        flat = nn.utils.parameters_to_vector(layers[rank].parameters()).detach()
        others = torch.empty(4 * 16 + 4)
        if rank == 1:
            dist.send(flat, 0)
            return [flat]
        dist.recv(others, 1)
        return [flat, others]

    same_on_both(program)


def test_a_checkpoint_of_shards_is_saved_and_loaded(tmp_path: Path) -> None:
    def program() -> Results:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        from torch.distributed.fsdp import fully_shard

        folder = tmp_path / dist.get_backend()
        model, again = Net(), Net()
        for each in (model, again):
            fully_shard(each)
        learn(model, sgd(model))
        checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
        restored = get_model_state_dict(again)
        checkpoint.load(restored, checkpoint_id=folder)
        return [
            value.full_tensor() if hasattr(value, "full_tensor") else value
            for value in restored.values()
        ]

    same_on_both(program)


def test_collectives_that_pass_gradients() -> None:
    def program() -> Results:
        import torch.distributed.nn.functional as collectives

        rank = dist.get_rank()
        tensor = torch.full((4,), float(rank + 1), requires_grad=True)
        total = collectives.all_reduce(tensor * 2)
        parts = collectives.all_gather(tensor)
        moved = collectives.all_to_all_single(torch.empty(4), tensor)
        (
            total.sum() + sum(part.pow(2).sum() for part in parts) + (moved * (rank + 3)).sum()
        ).backward()
        assert tensor.grad is not None
        return [total, *parts, moved, tensor.grad]

    same_on_both(program)


def test_parameters_are_reduced_and_broadcast_as_they_are() -> None:
    def program() -> Results:
        model = nn.Linear(40, 30)
        with torch.no_grad():
            model.weight += dist.get_rank()
        dist.broadcast(model.weight, 1)
        dist.all_reduce(model.weight)
        work = dist.all_reduce(model.weight, async_op=True)
        assert work is not None
        work.wait()
        outputs = [torch.empty(30, 40) for _ in range(2)]
        dist.all_gather(outputs, model.weight)
        dist.all_gather(outputs, model.weight, async_op=True).wait()  # type: ignore[union-attr]
        return [model.weight, *outputs]

    same_on_both(program)


def test_inference_tensors_are_reduced() -> None:
    def program() -> Results:
        with torch.inference_mode():
            tensor = torch.ones(5)
            dist.all_reduce(tensor)
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            gathered = torch.empty(10)
            work = dist.all_gather_into_tensor(gathered, tensor, async_op=True)
            assert work is not None
            work.wait()
        return [tensor, gathered]

    same_on_both(program)


@pytest.mark.parametrize("all_reduce", ["native", "ring", "master"])
def test_dures_own_strategies_have_the_bits_they_have_on_gloo(all_reduce: Any) -> None:
    from small import same_bits, small_task

    need("torch")
    one, other = (
        dure.train(
            small_task(),
            dure.DataParallel(8, all_reduce),
            dure.Processes(2, 30, backend),
            dure.Stop(steps=5),
        )
        for backend in ("gloo", "dure")
    )
    assert same_bits(one, other)


@pytest.fixture(autouse=True)
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """torch warns on every rank of what it will change."""
    yield
    capfd.readouterr()
