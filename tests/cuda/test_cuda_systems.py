"""Every system of ranks that share a GPU has the weights of the CPU, but for the order of sums."""

from __future__ import annotations

import pytest
from on_gpu import CLOSE, GPU

from rank_systems import CASES, adam, run_system, wide_network
from small import largest_difference, small_task

pytestmark = pytest.mark.needs_cuda

EXACT = [
    (system, ranks)
    for system, ranks, _ in CASES
    # Random draws of a GPU are others than those of the CPU.
    if not any(word in system for word in ("compression", "privacy"))
]


@pytest.mark.parametrize(("system", "ranks"), EXACT)
def test_ranks_that_share_a_gpu_have_the_weights_of_the_cpu(system: str, ranks: int) -> None:
    task = small_task(model=wide_network, optimizer=adam)
    here = run_system(task, system, ranks, "cpu")
    there = run_system(task, system, ranks, str(GPU))
    assert largest_difference(here, there) <= CLOSE


def test_a_rank_alone_uses_nccl() -> None:
    task = small_task(model=wide_network, optimizer=adam)
    here = run_system(task, "data-parallel,batch_size=8", 1, "cpu")
    there = run_system(task, "data-parallel,batch_size=8", 1, GPU.type)
    assert largest_difference(here, there) <= CLOSE
