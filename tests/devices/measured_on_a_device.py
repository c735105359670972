"""Memory, waits and utilisation of runs on accelerators, on the stand-in device of the tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
from dure.contracts.strategy import Strategy
from dure.errors import LossNotFiniteError
from dure.run import device_memory_check
from small import diverging_task, network, small_task

stand_in_device = pytest.importorskip("stand_in_device", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("accelerator")
SINGLE = dure.SingleWorker(batch_size=8, device="acc:0")
PARALLEL = dure.DataParallel(batch_size=8)
BOTH = pytest.mark.parametrize("strategy", [SINGLE, PARALLEL], ids=["single", "parallel"])
PEAK = 1e12


def model() -> torch.nn.Module:
    """Return the small network; a rank that unpickles this function has the device too."""
    return network()


def world_of(strategy: Strategy) -> dure.Processes:
    return dure.Processes(1, device="cpu" if strategy is SINGLE else "acc:0")


def trained(strategy: Strategy, **settings: Any) -> dure.Run:
    stop = settings.pop("stop", dure.Stop(steps=4))
    task = settings.pop("task", None) or small_task()
    return dure.train(task, strategy, world_of(strategy), stop, **settings)


def crossed_in_steps(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[Any]:
    """Return what crossed between host and device in each step of a run."""
    found: list[Any] = []
    made = type(strategy).learner

    def learner(self: Strategy, *given: Any) -> Any:
        result = made(self, *given)
        advance = result.advance

        def counted(flags: int) -> Any:
            with stand_in_device.crossings() as crossed:
                progress = advance(flags)
            found.append(crossed)
            return progress

        monkeypatch.setattr(result, "advance", counted)
        return result

    monkeypatch.setattr(type(strategy), "learner", learner)
    trained(strategy, **settings)
    return found


def test_a_step_of_a_single_worker_waits_for_its_loss_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in crossed_in_steps(SINGLE, monkeypatch):
        assert (step.synchronisations, step.to_host, step.to_host_bytes) == (1, 1, 8)
        assert step.to_device == 2  # inputs and targets


def test_micro_batches_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = dure.SingleWorker(batch_size=8, device="acc:0", accumulate=4)
    for step in crossed_in_steps(pieces, monkeypatch):
        assert step.to_host == 1
        assert step.synchronisations <= 1


def test_a_step_of_data_parallel_reads_its_trailer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in crossed_in_steps(PARALLEL, monkeypatch):
        # The copy of the trailer, with the loss, is the wait.
        assert (step.synchronisations, step.to_host) == (0, 1)
        assert step.to_host_bytes < 8 * 20
        assert step.to_device == 3  # inputs, targets and the trailer


@BOTH
def test_the_loss_of_every_step_is_that_of_the_cpu(strategy: Strategy) -> None:
    there = trained(strategy)
    here = dure.train(
        small_task(), dure.SingleWorker(batch_size=8), dure.Processes(1), dure.Stop(steps=4)
    )
    for mine, other in zip(there.history.steps, here.history.steps, strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=1e-12)


@BOTH
def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(
    strategy: Strategy, tmp_path: Path
) -> None:
    with pytest.raises(LossNotFiniteError) as there:
        trained(strategy, task=diverging_task(), out=tmp_path / "run")
    with pytest.raises(LossNotFiniteError) as here:
        dure.train(diverging_task(), dure.SingleWorker(batch_size=8), stop=dure.Stop(steps=4))
    assert str(there.value).splitlines()[0] == str(here.value).splitlines()[0]
    lines = (tmp_path / "run/history.jsonl").read_text().splitlines()
    assert [one["step"] for one in map(json.loads, lines) if one["kind"] == "step"] == [1]


@BOTH
def test_times_by_events_are_within_the_run(strategy: Strategy, tmp_path: Path) -> None:
    run = trained(strategy, out=tmp_path / "run", stop=dure.Stop(steps=12))
    worker = run.summary["per_worker"][0]
    kinds = ("compute_seconds", "communication_seconds", "idle_seconds")
    assert all(worker[kind] >= 0 for kind in kinds)
    assert 0 < worker["compute_seconds"] <= run.summary["seconds"]
    events = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    spans = [one for one in events if one["ph"] == "X" and one["cat"] == "compute"]
    names = {one["name"].split()[0] for one in spans}
    assert {"forward", "backward", "update"} <= names
    updates = [one["args"]["step"] for one in spans if one["name"].startswith("update")]
    # The last update is counted with the next loss, which never comes.
    assert updates == list(range(1, 12))


@BOTH
def test_peaks_of_a_device_are_in_history_and_summary(strategy: Strategy) -> None:
    run = trained(strategy)
    weights = sum(one.nbytes for one in run.model.parameters())
    peak = run.summary["peak_device_memory"]
    assert 2 * weights < peak <= run.summary["peak_device_reserved"]
    assert run.summary["per_worker"][0]["device_allocated"] == peak
    assert run.history.evaluations[-1].peak_device_memory > 0


def test_ranks_that_share_a_device_measure_their_own(tmp_path: Path) -> None:
    shared = dure.Processes(2, device="acc:0")
    task = small_task(model=model)
    summary = dure.train(task, PARALLEL, shared, dure.Stop(steps=2)).summary
    own = [worker["device_allocated"] for worker in summary["per_worker"]]
    assert len(own) == 2
    assert summary["peak_device_memory"] == max(own) < 1.5 * min(own)


def test_utilisation_is_model_operations_over_the_peak() -> None:
    run = trained(SINGLE, peak_flops=PEAK)
    worker = run.summary["per_worker"][0]
    weights = 6 * 12 + 12 * 8 + 8 * 3
    assert worker["model_flops"] == 4 * 3 * 8 * 2 * weights
    assert worker["available_flops"] == pytest.approx(PEAK * run.summary["seconds"])
    assert run.summary["mfu"] == worker["model_flops"] / worker["available_flops"]


def test_the_peak_of_a_known_device_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stand_in_device.DeviceModule,
        "get_device_name",
        lambda device: "NVIDIA H200",
        raising=False,
    )
    task = small_task(
        model=lambda: torch.nn.Linear(6, 3), dtype=torch.float32, test=None, precision="bf16"
    )
    run = trained(SINGLE, task=task)
    rate = run.summary["per_worker"][0]["available_flops"] / run.summary["seconds"]
    assert rate == pytest.approx(989.4e12)


def test_a_resumed_run_keeps_the_peak(tmp_path: Path) -> None:
    trained(SINGLE, peak_flops=PEAK, out=tmp_path / "run", stop=dure.Stop(steps=2))
    task = small_task()
    run = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=4))
    worker = run.summary["per_worker"][0]
    assert worker["available_flops"] == pytest.approx(PEAK * run.summary["seconds"])
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["peak_flops"] == PEAK


@pytest.mark.parametrize("peak", [0, -1.0, math.inf, math.nan, "989e12", True])
def test_a_peak_that_is_no_number_is_refused(peak: Any) -> None:
    with pytest.raises(ValueError, match="peak_flops is"):
        trained(SINGLE, peak_flops=peak)


def test_a_run_on_the_cpu_has_no_numbers_of_devices(tmp_path: Path) -> None:
    dure.train(
        small_task(), dure.DataParallel(), dure.Processes(1), dure.Stop(steps=2), out=tmp_path
    )
    for file in ("summary.json", "history.jsonl", "config.json"):
        text = (tmp_path / file).read_text()
        assert not any(word in text for word in ("device_", "flops", "mfu"))


def test_a_run_that_cannot_fit_on_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory_check, "LEAST", 0)
    task = small_task()
    weights = 215 * 8
    monkeypatch.setattr(device_memory_check, "_free", lambda devices: [3 * weights] * len(devices))
    dure.train(task, PARALLEL, dure.Processes(1, device="acc:1"), dure.Stop(steps=1))
    shared = dure.Processes(2, device="acc:1")
    with pytest.raises(ValueError, match="does not fit into memory") as refused:
        dure.train(task, PARALLEL, shared, dure.Stop(steps=1))
    told = str(refused.value)
    assert "each of 2 ranks on acc:1 needs 0.00344 MB" in told
    assert "0.00688 MB together, but only 0.00516 MB are available" in told
    assert "the free memory of acc:1" in told
    assert "\n" not in told


def test_free_memory_of_a_device_is_asked_by_another_process() -> None:
    devices = [torch.device("acc:0"), torch.device("acc:2")]
    here = device_memory_check._free(devices)
    assert all(free for free in here)
    assert all(free for free in device_memory_check._free_by_another(devices))
