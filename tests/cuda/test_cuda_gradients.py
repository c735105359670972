"""Ranks that share a GPU, in anybody's loop: the path of one process on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from on_gpu import BACKENDS, GPU, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from dure.collectives import compression
from dure.contracts.world import RankContext
from dure.parallel import DistributedDataParallel
from dure.parallel.zero import ZeroRedundancy
from small import CLASSES, FEATURES, network

pytestmark = pytest.mark.needs_cuda

CLOSE = 1e-12
Batch = tuple[Tensor, Tensor]


def made() -> nn.Module:
    torch.manual_seed(1)
    return network()


def batches(count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(8, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def part(batch: Batch, context: RankContext) -> Batch:
    """This rank's, on the GPU."""
    inputs, targets = (each.tensor_split(context.group.size)[context.group.rank] for each in batch)
    return inputs.to(GPU), targets.to(GPU)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, all_: list[Batch]) -> None:
    for inputs, targets in all_:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().cpu().reshape(-1) for one in model.state_dict().values()])


def alone(make: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> Tensor:
    """One process, on the CPU."""
    model = made()
    steps(model, make(model), batches())
    return vector(model)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", ["beside", "after", "auto"])
def test_gradients_are_averaged_on_a_gpu(overlap: Any, backend: Any) -> None:
    algorithms: list[Any] = ["ring", "tree", "auto", *(["native"] if backend == "gloo" else [])]

    def program(context: RankContext) -> list[tuple[Tensor, str]]:
        found = []
        for algorithm in algorithms:
            for size in (None, 700):
                model = DistributedDataParallel(
                    made().to(GPU),
                    context.group,
                    all_reduce=algorithm,
                    overlap=overlap,
                    bucket_bytes=size,
                )
                steps(model, sgd(model), [part(batch, context) for batch in batches()])
                found.append((vector(model), next(model.parameters()).device.type))
        return found

    expected = alone()
    for found in on_ranks(2, program, backend):
        for weights, kind in found:
            assert kind == "cuda"
            assert float((weights - expected).abs().max()) < CLOSE


def test_the_default_sums_through_the_host_where_no_backend_reaches_the_gpu() -> None:
    def program(context: RankContext) -> Tensor:
        model = DistributedDataParallel(made().to(GPU), context.group)
        steps(model, sgd(model), [part(batch, context) for batch in batches()])
        return vector(model)

    expected = alone()
    for found in on_ranks(2, program, "dure"):
        assert float((found - expected).abs().max()) < CLOSE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["cast:bfloat16", "top-k:0.2", "qsgd:4", "one-bit", "sign", "power-sgd:2"]
)
def test_what_is_compressed_on_a_gpu_is_the_same_on_all_ranks(name: str, backend: Any) -> None:
    def program(context: RankContext) -> Tensor:
        model = DistributedDataParallel(
            made().to(GPU), context.group, all_reduce="ring", compression=compression.parse(name)
        )
        steps(model, sgd(model), [part(batch, context) for batch in batches()])
        return vector(model)

    first, second = on_ranks(2, program, backend)
    assert torch.equal(first, second)
    assert bool(first.isfinite().all())
    # Lossy, but a step in the same direction.
    expected = alone()
    begun = vector(made())
    assert float(torch.dot(first - begun, expected - begun)) > 0


@pytest.mark.parametrize(
    ("backend", "algorithm"),
    [("gloo", "native"), ("gloo", "ring"), ("dure", "ring"), ("dure", "one_shot")],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [0, None])
def test_zero_divides_a_model_on_a_gpu(
    stage: Any, backend: Any, algorithm: Any, prefetch: int | None
) -> None:
    adam = partial(torch.optim.AdamW, lr=0.01)

    def program(context: RankContext) -> Tensor:
        model = made().to(GPU)
        optimizer = adam(model.parameters())
        zero = ZeroRedundancy(
            model,
            optimizer,
            process_group=context.group,
            stage=stage,
            units=60,
            algorithm=algorithm,
            prefetch=prefetch,
        )
        steps(model, optimizer, [part(batch, context) for batch in batches()])
        weights = zero.state_dict(everywhere=True)
        return torch.cat([one.cpu().reshape(-1) for one in weights.values()])

    expected = alone(lambda model: adam(model.parameters()))
    for found in on_ranks(2, program, backend):
        assert float((found - expected).abs().max()) < 1e-9


@pytest.mark.parametrize(("backend", "algorithm"), [("gloo", "native"), ("dure", "ring")])
def test_zero_in_bfloat16_has_one_model_on_all_ranks(backend: Any, algorithm: Any) -> None:
    def program(context: RankContext) -> Tensor:
        model = made().to(GPU).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = ZeroRedundancy(
            model, optimizer, process_group=context.group, precision="bf16", algorithm=algorithm
        )
        shares = [part(batch, context) for batch in batches()]
        steps(model, optimizer, [(inputs.float(), targets) for inputs, targets in shares])
        weights = zero.state_dict(everywhere=True)
        return torch.cat([one.cpu().double().reshape(-1) for one in weights.values()])

    first, second = on_ranks(2, program, backend)
    assert torch.equal(first, second)
    expected = alone(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert float((first - expected).abs().max()) < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_norm_follows_rank_0_on_a_gpu(backend: Any) -> None:
    def program(context: RankContext) -> Tensor:
        torch.manual_seed(1)
        layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)]
        module = nn.Sequential(*layers).double().to(GPU)
        model = DistributedDataParallel(module, context.group, all_reduce="ring")
        steps(model, sgd(model), [part(batch, context) for batch in batches()])
        return torch.cat([one.cpu().double().reshape(-1) for one in model.state_dict().values()])

    first, second = on_ranks(2, program, backend)
    assert torch.equal(first, second)
