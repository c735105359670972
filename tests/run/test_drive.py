"""What the driver measures of every system."""

from __future__ import annotations

import pytest

import dure
from dure.contracts.strategy import Strategy
from small import small_task

SYSTEMS: list[Strategy] = [
    dure.DataParallel(batch_size=8),
    dure.DataParallel(batch_size=8, all_reduce="native", overlap="beside", bucket_bytes=400),
    *(dure.ZeRO(stage=stage, batch_size=8) for stage in (1, 2, 3)),
    dure.ZeRO(stage=3, batch_size=8, prefetch=1, unit_size=60),
    dure.LocalSGD(batch_size=8, period=2),
]


@pytest.mark.parametrize("strategy", SYSTEMS, ids=str)
def test_a_worker_computes_talks_and_waits_for_no_longer_than_the_run(strategy: Strategy) -> None:
    summary = dure.train(small_task(), strategy, dure.Processes(2), dure.Stop(epochs=4)).summary
    kinds = ("compute_seconds", "communication_seconds", "idle_seconds", "hidden_seconds")
    for worker in summary["per_worker"]:
        assert all(worker[kind] >= 0 for kind in kinds), worker
    times = [summary["per_worker"][0][kind] for kind in kinds[:3]]
    assert 0 < sum(times) <= summary["seconds"], "no time is counted twice"
