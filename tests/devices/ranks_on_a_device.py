"""Every system of ranks computes on the devices of its ranks: the CPU's weights, to 1e-12.

The device refuses an operator that mixes memories, so a run that ends has mixed none.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dure
from dure.cli.main import main
from dure.errors import PeerLostError
from dure.run.registry import parse_strategy
from rank_systems import CASES, LINEAR, mixed_network, run_system, wide_network
from small import largest_difference, small_task

pytestmark = pytest.mark.usefixtures("accelerator")


@pytest.mark.parametrize(("system", "ranks", "model"), CASES)
def test_a_system_has_the_weights_of_the_cpu(
    system: str,
    ranks: int,
    model: str,
    accelerator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from on_device import NOTES, noted, noting_task

    task = noting_task(wide_network if model == LINEAR else mixed_network)
    here = run_system(task, system, ranks, "cpu")
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    # In every second case ranks share a device; in the others each has its own.
    device = f"{accelerator}:1" if CASES.index((system, ranks, model)) % 2 else accelerator
    there = run_system(task, system, ranks, device)
    assert largest_difference(here, there) <= 1e-12
    assert noted(tmp_path / "notes")[accelerator] >= 5
    assert there.model[0].weight.device.type == "cpu"


@pytest.mark.parametrize("first", ["cpu", "acc"])
def test_a_run_goes_on_on_another_device(first: str, accelerator: str, tmp_path: Path) -> None:
    from on_device import noting_task

    second = {"cpu": accelerator, accelerator: "cpu"}[first]
    strategy = parse_strategy("zero,batch_size=8,stage=2")
    train = dure.train(noting_task(), strategy, dure.Processes(2), dure.Stop(steps=6))
    dure.train(
        noting_task(),
        strategy,
        dure.Processes(2, device=first),
        dure.Stop(steps=3),
        out=tmp_path / "run",
    )
    resumed = dure.resume(
        tmp_path / "run",
        task=noting_task(),
        device=second,
        stop=dure.Stop(steps=6),
    )
    assert largest_difference(train, resumed) <= 1e-12


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("system", ["data-parallel", "zero", "pipeline"])
def test_a_lost_rank_is_an_error_by_its_name(system: str, shared: bool, accelerator: str) -> None:
    from on_device import dying_loss, noting_task

    task = noting_task(wide_network, loss=dying_loss)
    device = f"{accelerator}:0" if shared else accelerator
    world = dure.Processes(2, deadline=5, device=device)
    with pytest.raises(PeerLostError, match="rank 1") as lost:
        dure.train(task, parse_strategy(f"{system},batch_size=8"), world, dure.Stop(steps=9))
    assert lost.value.ranks == (1,)


@pytest.mark.parametrize("system", ["single-worker", "fed-avg"])
def test_the_command_line_resumes_on_another_device(
    system: str, accelerator: str, tmp_path: Path
) -> None:
    limit = "--rounds" if system == "fed-avg" else "--steps"
    run = str(tmp_path / "run")
    on = ["--device", f"{accelerator}:0"]
    assert main(["train", "digits", system, *on, limit, "1", "--out", run, "--json"]) == 0
    assert main(["train", "--resume", run, "--device", "cpu", limit, "2", "--json"]) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    place = config["strategy"] if system == "single-worker" else config["world"]
    assert place["device"] == "cpu"


def test_a_device_that_nothing_in_the_folder_has_is_refused(
    accelerator: str, tmp_path: Path
) -> None:
    world = dure.Threads(1, ("cpu",))
    strategy = parse_strategy("data-parallel,batch_size=8")
    task = small_task()
    dure.train(task, strategy, world, dure.Stop(steps=1), out=tmp_path / "run")
    with pytest.raises(ValueError, match="give strategy or world with their devices"):
        dure.resume(tmp_path / "run", task=task, device=accelerator, stop=dure.Stop(steps=2))
