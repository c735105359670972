"""What a step copies between a device and the host: its batch and some numbers, no weights.

The table of docs/gpus.md says what else crosses: gradients between ranks that share a device,
messages to and from parameter servers, and offloaded parts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
from dure.contracts.world import RankContext
from dure.run.registry import parse_strategy
from rank_systems import wide_network
from small import largest_difference

pytestmark = pytest.mark.usefixtures("accelerator")

WEIGHTS = 8 * (6 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3)
"""Bytes of the weights of `wide_network`."""

NUMBERS = 1500
"""Bytes of losses, trailers and counts, at most: far below the weights."""

SYSTEMS = [
    ("data-parallel,batch_size=8", 2),
    ("data-parallel,batch_size=8,all_reduce=native", 2),
    ("zero,batch_size=8,stage=1", 2),
    ("zero,batch_size=8,stage=2", 2),
    ("zero,batch_size=8,stage=3", 2),
    ("pipeline,batch_size=8,microbatches=2", 2),
    ("tensor-parallel,batch_size=8", 2),
    ("parallel,batch_size=8,microbatches=2,data=2,pipeline=2", 4),
    ("local-sgd,batch_size=8,period=2", 2),
    ("diloco,batch_size=8,period=2", 2),
]


def measured(system: str, spoil: bool, context: RankContext) -> list[dict[str, int]]:
    """What the third step of each rank copies. spoil: after each step the weights are read."""
    from on_device import noting_task

    from stand_in_device import crossings

    learner = parse_strategy(system).learner(noting_task(wide_network), context, 0)
    for _ in range(2):
        learner.advance(0)
    with crossings() as found:
        learner.advance(0)
        if spoil:
            for parameter in learner.model.parameters():  # type: ignore[attr-defined]
                parameter.cpu()
    rows = context.group.gather_bytes(pickle.dumps(vars(found)))
    return [pickle.loads(row) for row in rows]


def in_a_step(system: str, ranks: int, device: str, spoil: bool = False) -> list[dict[str, int]]:
    from on_device import ready

    program: Callable[[RankContext], Any] = partial(ready, measured, system, spoil)
    found: list[dict[str, int]] = dure.Processes(ranks, device=device).run(program, _silent)
    return found


def _silent(event: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(("system", "ranks"), SYSTEMS)
def test_a_step_copies_no_weights(system: str, ranks: int, accelerator: str) -> None:
    for rank in in_a_step(system, ranks, accelerator):
        assert rank["to_host_bytes"] <= NUMBERS, rank
        assert rank["to_device_bytes"] <= NUMBERS, rank


def test_ranks_that_share_a_device_exchange_gradients_through_the_host(accelerator: str) -> None:
    for rank in in_a_step("data-parallel,batch_size=8,all_reduce=native", 2, f"{accelerator}:0"):
        assert WEIGHTS <= rank["to_host_bytes"] <= WEIGHTS + NUMBERS, rank


def test_a_planted_copy_is_found(accelerator: str) -> None:
    for rank in in_a_step("data-parallel,batch_size=8", 2, accelerator, spoil=True):
        assert rank["to_host_bytes"] >= WEIGHTS, rank


def test_mixed_memories_are_refused(accelerator: str) -> None:
    layer = torch.nn.Linear(3, 2, device=accelerator)
    with pytest.raises(RuntimeError, match="two devices"):
        layer(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, device=f"{accelerator}:0") + torch.ones(2, device=f"{accelerator}:1")


def large_network() -> torch.nn.Module:
    """A network whose weights have more than 1 MiB each: smaller tensors are not offloaded."""
    wide = 1 << 15
    layers = [torch.nn.Linear(6, wide), torch.nn.Tanh(), torch.nn.Linear(wide, 3)]
    return torch.nn.Sequential(*layers).double()


@pytest.mark.parametrize("where", ["memory", "files"])
def test_offloaded_parts_leave_the_device(where: str, accelerator: str, tmp_path: Path) -> None:
    from on_device import noting_task

    from stand_in_device import crossings

    task = noting_task(large_network)
    stop = dure.Stop(steps=3)
    plain = dure.SingleWorker(8, device=accelerator)
    folder = str(tmp_path) if where == "files" else None
    offloaded = dure.SingleWorker(
        8, device=accelerator, offload="optimizer,activations", offload_folder=folder
    )
    with crossings() as few:
        here = dure.train(task, plain, stop=stop)
    with crossings() as many:
        there = dure.train(task, offloaded, stop=stop)
    assert largest_difference(here, there) <= 1e-12
    state = 2 * sum(one.nbytes for one in here.model.parameters())
    # The optimizer's state travels twice in each step after the first, in both directions.
    assert many.to_host_bytes - few.to_host_bytes > 2 * state
    assert many.to_device_bytes - few.to_device_bytes > 2 * state
