"""Clients on a Ray cluster of this machine. Ray is an extra: without it these tests are left out."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from clients_at_work import jobs_of, results, same, weights_of

from dure.errors import LossNotFiniteError
from dure.federated.cohort.choose import engine_for
from dure.federated.cohort.loop import LoopEngine
from small import network, small_task


def test_ray_gives_the_bits_of_the_loop_in_the_order_of_the_jobs_and_a_client_s_own_error() -> None:
    task = small_task()
    jobs = jobs_of([9, 4, 1, 12, 7, 8], [3, 1, 2, 9, 4, 2], weights_of(task.model))
    engine = engine_for(task, network(), task.train, 4, 3, jobs, 2, "loop-ray")
    assert same(results(engine, jobs), results(LoopEngine(task, network(), task.train, 4, 3), jobs))
    engine.close()
    broken = small_task(loss=lambda outputs, targets: outputs.sum() * float("nan"))
    engine = engine_for(broken, network(), broken.train, 4, 3, jobs, 2, "loop-ray")
    with pytest.raises(LossNotFiniteError, match="client 0"):
        results(engine, jobs)
    engine.close()
