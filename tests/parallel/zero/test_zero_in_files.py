"""A divided model's checkpoint: no rank needs memory for it, and it is what it was in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import on_ranks
from torch import Tensor, nn

from dure.collectives import tensor_transfer
from dure.contracts.world import RankContext
from dure.machine.memory import trim_heap
from dure.memory.spill_store import SpillStore
from dure.parallel.zero import ZeroRedundancy
from dure.record.disk_tensors import DiskTensor, in_memory

WIDTH, LAYERS = 1024, 8
WHOLE = LAYERS * WIDTH * WIDTH * 4
"""Bytes of the model; Adam has twice as many."""


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))


def divided(context: RankContext, seed: int) -> ZeroRedundancy:
    model = model_of(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ZeroRedundancy(model, optimizer, stage=3, process_group=context.group)


def stepped(zero: ZeroRedundancy) -> None:
    zero.model(torch.ones(2, WIDTH)).square().sum().backward()
    zero.optimizer.step()
    zero.optimizer.zero_grad()


def peak(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(name))
    return int(found.split()[1]) * 1024


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (Tensor, DiskTensor)):
        return torch.equal(in_memory(left), in_memory(right))
    return bool(left == right)


def program(folder: Path, context: RankContext) -> list[Any]:
    tensor_transfer.PIECE = 1 << 20
    zero = divided(context, 1)
    stepped(zero)
    reset = Path("/proc/self/clear_refs")
    trim_heap()
    before = peak("VmRSS")
    reset.write_text("5")
    weights = zero.weights(SpillStore(folder))
    state = zero.optimizer_state_dict(SpillStore(folder))
    grown = peak("VmHWM") - before
    told: Any = None
    if context.group.rank == 0:
        lie = [isinstance(leaf, DiskTensor) for leaf in weights.leaves.values()]  # type: ignore[attr-defined]
        told = [sum(lie), list(weights) == list(model_of(1).state_dict())]
    like = [same(dict(weights), zero.state_dict()), same(state, zero.optimizer_state_dict())]
    return [grown, told, like]


def test_rank_0_puts_it_together_without_memory_for_it(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not tell peaks of memory anew")
    first, second = on_ranks(2, partial(program, tmp_path), "gloo")
    # Three times as much goes through, and a few pieces of a megabyte are there at once.
    assert first[0] < WHOLE / 2
    assert second[0] < WHOLE / 2
    assert first[1:] == [[LAYERS, True], [True, True]]
    assert second[2] == [True, True]
