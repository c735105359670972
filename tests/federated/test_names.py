"""Natural clients keep their names: in errors, run folders, messages and reports."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import dure
from dure.errors import WorkerFailedError
from dure.report import write_report
from small import examples, small_task

# Sorted as texts, these are in another order than as numbers.
WARDS = ["10", "9", "<b>é</b>"]


def task_of(loss: object = F.cross_entropy) -> dure.Task:
    data = examples()
    keys = [WARDS[number % 3] for number in range(len(data))]
    return small_task(train=dure.Examples(data.inputs, data.targets, keys), loss=loss)


def test_the_run_folder_and_the_report_have_the_names_of_clients(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    strategy = dure.FedAvg(clients=None, partition="natural-key", held_out=0.2)
    world = dure.Simulated(attack="sign-flip", attackers=1)
    dure.train(task_of(), strategy, world, dure.Stop(rounds=2), out=folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["partition"]["names"] == WARDS
    summary = json.loads((folder / "summary.json").read_text())
    assert [worker["name"] for worker in summary["per_worker"]] == [
        "server",
        *(f'client {number} ("{name}")' for number, name in enumerate(WARDS)),
    ]
    page = write_report([folder], tmp_path / "report.html", "names").read_text(encoding="utf-8")
    plain = page.replace(", ", ",").replace(": ", ":")
    assert '"rows":["10","9",' in plain, "the lanes of who took part when"
    assert '"names":["10","9",' in plain, "the figure of the partition"
    assert "client 9" in page, "the points of updates"
    assert "<b>é" not in page, "a name is text, and no part of the page"
    assert "9" in str(strategy.division(task_of(), 0)).splitlines()[3].split()[0]


@pytest.mark.parametrize("engine", ["loop", "loop-processes"])
def test_an_error_of_one_s_own_code_names_the_client(engine: str) -> None:
    data = examples()
    inputs = data.inputs.clone()
    inputs[1::3] = 7.0  # those of ward 9, which is client 1

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad and bool((outputs == outputs[0]).all()):
            raise KeyError("no such ward")
        return F.cross_entropy(outputs, targets)

    keys = [WARDS[number % 3] for number in range(len(data))]
    broken = small_task(train=dure.Examples(inputs, data.targets, keys), loss=loss, test=None)
    with pytest.raises(WorkerFailedError, match=r'client 1 \("9"\) failed in round 1: KeyError'):
        dure.train(
            broken,
            dure.FedAvg(clients=None, partition="natural-key", batch_size=None),
            dure.Simulated(engine=engine),  # type: ignore[arg-type]
            dure.Stop(rounds=1),
        )


def test_who_is_refused_is_named() -> None:
    data = examples()
    inputs = data.inputs.clone()
    inputs[1] = math.nan
    keys = [WARDS[number % 3] for number in range(len(data))]
    broken = small_task(train=dure.Examples(inputs, data.targets, keys))
    with pytest.warns(UserWarning, match=r'round 1: the update of client 1 \("9"\) is rejected'):
        dure.train(
            broken, dure.FedAvg(clients=None, partition="natural-key"), stop=dure.Stop(rounds=1)
        )


def test_clients_that_are_drawn_have_numbers_alone() -> None:
    run = dure.train(task_of(), dure.FedAvg(clients=3), stop=dure.Stop(rounds=1))
    assert [worker["name"] for worker in run.summary["per_worker"]][1:] == [
        "client 0",
        "client 1",
        "client 2",
    ]
