"""Simulated clients on an accelerator: the weights of the CPU, computed there, and what is refused.

The accelerator is a stand-in (`stand_in_device`), which refuses to mix devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
import stand_in_device
from dure.cli.worlds import entry
from dure.errors import WorkerFailedError
from dure.federated.engines import on_ray as on_ray_module
from dure.run.registry import decode_world, encode, parse_strategy
from small import CLASSES, FEATURES, largest_difference, network, small_task

ON = "acc:1"
ROUNDS = dure.Stop(rounds=2)
CLOSE = 1e-12

SEEN: set[str] = set()
"""Types of the devices on which a model's forward pass has run."""


class Records(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        SEEN.add(str(inputs.device.type))  # of a traced model it is no text
        return inputs


def recording() -> nn.Module:
    return nn.Sequential(Records(), *network())


def with_buffers() -> nn.Module:
    layers = [nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES)]
    return nn.Sequential(Records(), *layers).double()


def run(system: str, device: str | None, model: Callable[[], nn.Module], **known: Any) -> dure.Run:
    task = small_task(model=model, n=24)
    world = dure.Simulated(device=device, **known)
    return dure.train(task, parse_strategy(system), world, ROUNDS, seed=3)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("fed-sgd,clients=3", {}),
    ("fed-avg,clients=3,batch_size=5,held_out=0.3,fine_tune=1", {"engine": "loop"}),
    ("fed-adam,clients=3,batch_size=5", {}),
    ("scaffold,clients=3,batch_size=5", {"engine": "loop"}),
    ("fed-buff,clients=4,batch_size=5", {"devices": "lognormal:1"}),
    ("ditto,clients=3,batch_size=5", {}),
    ("per-fed-avg,clients=3,batch_size=5", {}),
    ("byzantine,clients=4,groups=2,batch_size=5", {"attack": "alie", "attackers": 1}),
    (
        "fed-avg,clients=4,batch_size=5,aggregate=centred-clipping:10",
        {"attack": "sign-flip", "attackers": 1},
    ),
    (
        "fed-avg,clients=4,batch_size=5,aggregate=median",
        {"attack": "backdoor", "attackers": 1, "engine": "loop"},
    ),
    ("fed-avg,clients=3,batch_size=5,freeze_at=1", {"arrival": "window:0.5:3600"}),
    ("fed-avg,clients=3,batch_size=5,privacy=secure-aggregation", {}),
    # The noise of a simulation follows from the seed.
    ("fed-avg,clients=3,batch_size=5,privacy=user-level:1:1.1", {}),
    ("fed-avg,clients=3,batch_size=5,privacy=dp-sgd:1:1.1", {}),
]


@pytest.mark.parametrize(("system", "known"), CASES)
def test_clients_on_a_device_get_the_weights_of_the_cpu(system: str, known: dict[str, Any]) -> None:
    on_cpu = run(system, None, recording, **known)
    SEEN.clear()
    on_device = run(system, ON, recording, **known)
    assert "acc" in SEEN
    assert largest_difference(on_device, on_cpu) < CLOSE
    assert {str(one.device) for one in on_device.model.state_dict().values()} == {"cpu"}
    evaluated = zip(on_device.history.evaluations, on_cpu.history.evaluations, strict=True)
    for one, other in evaluated:
        assert one.metrics == pytest.approx(other.metrics, abs=1e-9)


@pytest.mark.parametrize(
    "system", ["fed-prox,clients=3,batch_size=5", "scaffold,clients=3,batch_size=5"]
)
def test_many_clients_at_once_get_the_weights_of_the_cpu(system: str) -> None:
    on_cpu = run(system, None, network, engine="batched")
    with stand_in_device.crossings() as crossed:
        on_device = run(system, ON, network, engine="batched")
    # All examples are moved at once.
    assert crossed.to_device_bytes > 24 * FEATURES * 8
    assert largest_difference(on_device, on_cpu) < CLOSE


def test_buffers_are_averaged_on_a_device() -> None:
    runs = [run("fed-avg,clients=3,batch_size=5", name, with_buffers) for name in (ON, None)]
    assert largest_difference(*runs) < CLOSE


def test_a_pass_in_float16_is_repeated_with_the_devices_draws() -> None:
    """A loss larger by 2^12 overflows first, and gives the same weights."""

    def drops() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    runs = [
        dure.train(
            small_task(
                model=drops,
                dtype=torch.float32,
                precision="fp16",
                loss=partial(scaled_loss, by=by),
                optimizer=partial(torch.optim.SGD, lr=0.25 / by),
                n=24,
            ),
            dure.FedAvg(3, batch_size=5),
            dure.Simulated(device=ON),
            ROUNDS,
        )
        for by in (1.0, 2.0**12)
    ]
    assert largest_difference(*runs) < 1e-6


def scaled_loss(outputs: Tensor, targets: Tensor, by: float) -> Tensor:
    return by * nn.functional.cross_entropy(outputs.float(), targets)


def test_a_run_on_a_device_is_resumed_there(tmp_path: Path) -> None:
    task = small_task(n=24)
    strategy = dure.Scaffold(3, batch_size=5)
    world = dure.Simulated(device=ON)
    whole = dure.train(task, strategy, world, dure.Stop(rounds=3))
    dure.train(task, strategy, world, dure.Stop(rounds=1), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=3))
    assert largest_difference(whole, resumed) == 0
    assert resumed.summary["label"].endswith(", on acc:1")


def test_updates_are_stored_in_the_cpus_memory(tmp_path: Path) -> None:
    world = dure.Simulated(device=ON, keep_updates=1)
    task = small_task(n=24)
    run = dure.train(
        task, dure.FedAvg(3, batch_size=5), world, dure.Stop(rounds=1), out=tmp_path / "run"
    )
    assert run.folder is not None
    assert any((run.folder / "updates").rglob("*"))


# The setting


def test_the_device_is_a_setting_of_the_world() -> None:
    assert dure.Simulated().device is None
    assert dure.Simulated(device="auto").device == "acc"
    assert dure.Simulated(device="cpu").told() == []
    assert entry("fed-avg,device=acc", None)[1] == dure.Simulated(device="acc")
    written = encode(dure.Simulated(device="acc:1"))
    assert decode_world(written) == dure.Simulated(device="acc:1")
    # A folder of a dure without the setting.
    older = {name: value for name, value in encode(dure.Simulated()).items() if name != "device"}
    assert decode_world(older) == dure.Simulated()


def test_a_model_that_is_made_on_a_device_is_moved_to_the_cpu_if_that_is_named() -> None:
    SEEN.clear()
    found = run("fed-avg,clients=3", "cpu", lambda: recording().to(ON), engine="loop")
    # The checks before the run compute where the model was made.
    assert "cpu" in SEEN
    # The run's model is where the task makes it.
    found.model.cpu()
    assert largest_difference(found, run("fed-avg,clients=3", None, recording)) < CLOSE


# Refusals


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("acc:7", "this machine has no acc:7: its acc devices are acc:0 to acc:3"),
        ("xpu", "this machine has no XPU device, so xpu cannot be used: use cpu"),
        ("gpu", "'gpu' is not a device"),
    ],
)
def test_a_device_that_is_not_here_is_refused(device: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dure.Simulated(device=device)


def refused(engine: Any, device: str | None, **changed: Any) -> str:
    world = dure.Simulated(engine=engine, device=device)
    with pytest.raises(ValueError, match=f"the engine {engine}") as found:
        dure.train(small_task(**changed), dure.FedAvg(3), world, ROUNDS)
    return str(found.value)


@pytest.mark.parametrize("engine", ["loop-processes", "batched-processes"])
def test_forked_processes_do_not_compute_on_a_device(engine: str) -> None:
    said = f"the engine {engine} computes on the CPU, but these clients are computed on acc:1"
    assert refused(engine, ON).startswith(said)
    # The stand-in is in use as soon as it is there.
    assert "which a process that uses acc does not allow" in refused(engine, None)


def test_clients_on_the_cpu_are_forked_before_any_gradient_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand_in_device.DeviceModule, "is_initialized", lambda: False)
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1)).sum().backward()
    said = "which a process that has computed gradients on a machine with acc does not allow"
    assert said in refused("loop-processes", None)
    # Batched training has backward passes of its own, without autograd.
    forked, here = (
        run("fed-avg,clients=3,batch_size=5", None, network, engine=engine, processes=2)
        for engine in ("batched-processes", "batched")
    )
    assert forked.summary["facts"][0]["engine"] == "batched-processes"
    assert largest_difference(forked, here) < CLOSE


def test_ray_chooses_the_devices_of_its_actors() -> None:
    assert "so acc:1 cannot be promised: give the device acc" in refused("loop-ray", ON)
    made_there = refused("loop-ray", None, model=lambda: network().to(ON))
    assert "return the model on the CPU, and give the device acc" in made_there


def test_a_model_on_two_devices_is_refused() -> None:
    def halves() -> nn.Module:
        model = network()
        model[0].to(ON)
        return model

    with pytest.raises(ValueError, match="move the whole model to one device"):
        run("fed-avg,clients=3", None, halves)


def test_actors_share_the_devices_of_a_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=2, resources={"acc": 1}, **quiet)
    try:
        system = "fed-avg,clients=3,batch_size=5"
        on_ray = run(system, "acc", recording, engine="loop-ray", processes=2)
        assert on_ray.summary["facts"][0]["engine"] == "loop-ray"
        # A cluster that has none of them.
        monkeypatch.setattr(on_ray_module, "ray_resource", lambda kind: "others")
        with pytest.raises(WorkerFailedError, match="the Ray cluster has no others, so clients"):
            run(system, "acc", recording, engine="loop-ray")
    finally:
        ray.shutdown()
    assert largest_difference(on_ray, run(system, None, recording)) < CLOSE


# Over a network


def test_a_client_joins_on_a_device(tmp_path: Path) -> None:
    task = small_task(model=recording, n=24)
    sites: list[threading.Thread] = []

    def join(url: str, number: int) -> None:
        device = ON if number else ""
        dure.join(url, task, name=f"site {number}", part=number, device=device)

    def hears(event: dict[str, Any]) -> None:
        if "serving" in event:
            for number in range(2):
                sites.append(threading.Thread(target=join, args=(event["serving"], number)))
                sites[-1].start()

    SEEN.clear()
    served = dure.serve(
        task,
        dure.Scaffold(2, batch_size=5),
        ROUNDS,
        out=tmp_path / "run",
        on_progress=hears,
        port=0,
        access="open",
    )
    for site in sites:
        site.join(60)
    assert {"acc", "cpu"} == SEEN
    simulated = dure.train(task, dure.Scaffold(2, batch_size=5), stop=ROUNDS)
    assert largest_difference(served, simulated) < CLOSE


def test_a_client_refuses_a_device_that_is_not_here() -> None:
    with pytest.raises(ValueError, match="this machine has no acc:9"):
        dure.join("http://127.0.0.1:1", small_task(), device="acc:9")
