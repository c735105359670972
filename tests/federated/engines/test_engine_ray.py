"""Clients on a Ray cluster of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
from clients_at_work import jobs_of, results, same, weights_of
from torch import nn

import dure
from dure.errors import WorkerFailedError
from dure.federated.engines.engine_choice import EngineInputs, engine_for
from dure.federated.engines.loop import LoopEngine
from small import network, same_bits, small_task


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One for all tests: it takes seconds to start. Engines use the one that runs, and leave it
    running."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_the_bits_are_those_of_the_loop_in_the_order_of_the_jobs() -> None:
    task = small_task()
    jobs = jobs_of([9, 4, 1, 12, 7, 8], [3, 1, 2, 9, 4, 2], weights_of(task.model))
    engine = engine_for(EngineInputs(task, network(), task.train, 4, 3, jobs, 2, "loop-ray"))
    assert same(results(engine, jobs), results(LoopEngine(task, network(), task.train, 4, 3), jobs))
    engine.close()
    assert ray.is_initialized()


def frozen_first() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index,operator]
    return model


def test_frozen_weights_that_are_not_those_of_the_seed_reach_the_actors() -> None:
    task = small_task(model=frozen_first)

    def another_one() -> nn.Module:
        torch.manual_seed(9)
        return frozen_first()

    jobs = jobs_of([9, 4, 1], [3, 1, 2], weights_of(frozen_first))
    engine = engine_for(EngineInputs(task, another_one(), task.train, 4, 3, jobs, 2, "loop-ray"))
    expected = results(LoopEngine(task, another_one(), task.train, 4, 3), jobs)
    assert same(results(engine, jobs), expected)
    engine.close()


def test_a_run_on_it_is_the_run_without_it() -> None:
    def run(engine: str) -> dure.Run:
        strategy = dure.FedProx(clients=6, fraction=0.5, batch_size=4)
        return dure.train(
            small_task(), strategy, dure.Simulated(engine=engine), stop=dure.Stop(rounds=3), seed=1
        )

    on_ray = run("loop-ray")
    assert on_ray.summary["facts"][0]["engine"] == "loop-ray"
    assert same_bits(on_ray, run("loop"))


OWN = """
import functools, torch, dure
from torch.nn import functional as F

@torch.library.custom_op("dure_ray_tests::same", mutates_args=())
def same(values: torch.Tensor) -> torch.Tensor:
    return values.clone()

same.register_autograd(lambda context, gradient: gradient)

class Net(torch.nn.Linear):
    def forward(self, inputs):
        assert torch.are_deterministic_algorithms_enabled()
        return torch.ops.dure_ray_tests.same(super().forward(inputs))

def task():
    inputs = torch.randn(24, 6)
    data = (inputs, (inputs[:, 0] > 0).long())
    return dure.Task(functools.partial(Net, 6, 2), F.cross_entropy, data)
"""


def test_what_a_tasks_file_registers_and_what_is_set_here_is_there_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    task = dure.load_task(f"{tmp_path}/mine.py:task")
    torch.use_deterministic_algorithms(True)
    try:
        world = dure.Simulated(engine="loop-ray", processes=1)
        run = dure.train(task, dure.FedAvg(clients=2), world, dure.Stop(rounds=1))
    finally:
        torch.use_deterministic_algorithms(False)
    assert run.summary["facts"][0]["engine"] == "loop-ray"


def wait_for_the_end(actor) -> None:
    """Until then it may take another job."""
    with suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote(), timeout=60)


def test_a_client_that_diverges_is_a_failure_and_a_lost_actor_names_the_client() -> None:
    broken = small_task(loss=lambda outputs, targets: outputs.sum() * float("nan"))
    jobs = jobs_of([9, 4, 1], [3, 1, 2], weights_of(broken.model))
    engine = engine_for(EngineInputs(broken, network(), broken.train, 4, 3, jobs, 2, "loop-ray"))
    failure = "its first loss is not finite"
    assert [each.failure for each in results(engine, jobs)] == [failure] * 3
    for actor in engine.actors:
        ray.kill(actor)
        wait_for_the_end(actor)
    with pytest.raises(WorkerFailedError, match=r"client 0 .*its actor was lost"):
        results(engine, jobs)
    engine.close()


def test_an_actor_without_progress_is_an_error_that_names_the_client() -> None:
    def hangs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) == 3:
            time.sleep(600)
        return outputs.sum()

    task = small_task(loss=hangs)
    jobs = jobs_of([4, 3, 4], [1, 1, 1], weights_of(task.model))
    engine = engine_for(
        EngineInputs(task, network(), task.train, 4, 3, jobs, 2, "loop-ray", deadline=0.4)
    )
    with pytest.raises(WorkerFailedError, match=r"^client 1 failed in round 3: .* made no step"):
        results(engine, jobs)
    engine.close()
