"""Collectives over NCCL on one device: a group of one rank, which is all that one device allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_gpu import GPU
from torch import nn

from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import all_reduce
from dure.collectives.group import Group
from dure.collectives.reduce_scatter import reduce_scatter
from dure.parallel.tensor import parallelize, whole_state_dict
from dure.parallel.tensor.chain_plans import MAKERS, chain_plan

pytestmark = pytest.mark.needs_cuda


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=GPU)
    try:
        yield Group()
    finally:
        dist.destroy_process_group()


def test_collectives_of_one_rank_give_what_they_got(group: Group) -> None:
    tensor = torch.arange(24, dtype=torch.float32, device=GPU).view(4, 6)
    assert torch.equal(all_reduce(tensor.clone(), group, "native"), tensor)
    assert torch.equal(all_gather(tensor.clone(), group, "native")[0], tensor)
    assert torch.equal(reduce_scatter(tensor.clone()[None], group, "native").view(4, 6), tensor)


@pytest.mark.parametrize("plan", list(MAKERS))
def test_a_chain_divided_for_one_rank_is_what_it_was(group: Group, plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4)).double().to(GPU)
    inputs = torch.randn(3, 8, dtype=torch.float64, device=GPU)
    expected = model(inputs)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize(model, chain_plan(plan, model), group)
    assert torch.equal(model(inputs), expected)
    after = whole_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
