"""A killed run, resumed, ends with the bits of the unbroken one: by real SIGKILLs, on every
system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import dure
from dure.cli.main import main
from dure.record.checkpoint import (
    pack_checkpoint,
)
from dure.record.run import RunFolder
from written import files_in, unpacked

TASK_FILE = '''
import json
import os
import json
import time
from functools import partial
import json
import torch
from torch import nn
from torch.nn import functional as F
import json
import dure

class Net(nn.Module):
    """Slow enough to be killed midway; the state of dropout and batch norm must come back."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3)
        )

    def forward(self, inputs):
        if self.training:
            time.sleep(float(os.environ.get("PAUSE", 0)))
        return self.body(inputs)

def task(examples: int = 96) -> dure.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, 5, generator=generator)
    data = inputs, torch.randint(0, 3, (examples,), generator=generator)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return dure.Task(model=Net, loss=F.cross_entropy, train=data, test=data, optimizer=optimizer)
'''

SYSTEMS = {
    "single-worker": ["single-worker", "--batch-size", "16", "--steps", "50"],
    "threads": [
        "data-parallel",
        "--world",
        "threads",
        "--workers",
        "2",
        "--batch-size",
        "16",
        "--steps",
        "50",
    ],
    "admm": ["admm", "--workers", "2", "--batch-size", "16", "--rounds", "16"],
    "fed-avg": [
        "fed-avg",
        "--clients",
        "6",
        "--fraction",
        "0.5",
        "--batch-size",
        "8",
        "--rounds",
        "16",
    ],
}


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks_of_mine.py"
    path.write_text(TASK_FILE)
    return path


def command(task_file: Path, system: str, out: Path) -> list[str]:
    every = ["--checkpoint-every", "3", "--evaluate-every", "5"]
    return ["train", f"{task_file}:task", *SYSTEMS[system], "--out", str(out), *every]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_killed_run_goes_on_to_the_same_bits(
    system: str, task_file: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(command(task_file, system, whole)) == 0

    process = subprocess.Popen(
        [sys.executable, "-m", "dure", *command(task_file, system, broken)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PAUSE": "0.06"},
    )
    until = time.monotonic() + 60
    while not list(broken.glob("checkpoint/[0-9]*")) and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (broken / "summary.json").exists(), "the run was killed in the middle"

    assert main(["train", "--resume", str(broken)]) == 0
    mine, expected = load_file(broken / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(mine[name].equal(expected[name]) for name in expected)
    assert mine.keys() == expected.keys()

    first, second = RunFolder(whole).history(), RunFolder(broken).history()
    assert [(s.step, s.samples, s.loss) for s in first.steps] == [
        (s.step, s.samples, s.loss) for s in second.steps
    ]
    assert [(e.step, e.metrics) for e in first.evaluations] == [
        (e.step, e.metrics) for e in second.evaluations
    ]
    assert [e.bytes_sent for e in first.evaluations] == [e.bytes_sent for e in second.evaluations]


def test_a_task_made_in_python_has_to_be_given_again(tmp_path: Path) -> None:
    from small import same_bits, small_task

    short, long = dure.Stop(steps=6), dure.Stop(steps=15)
    dure.train(small_task(), dure.SingleWorker(8), stop=short, out=tmp_path / "run")
    with pytest.raises(dure.errors.RunFolderError, match="created in Python"):
        dure.resume(tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=small_task(), stop=long)
    assert same_bits(resumed, dure.train(small_task(), dure.SingleWorker(8), stop=long))


def change_state(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the state of a run's checkpoint, as another dure would have written it."""
    (newest,) = (folder / "checkpoint").iterdir()
    weights, state = unpacked(files_in(folder / "checkpoint"))
    change(state)
    for path, content in zip(
        ("model.safetensors", "state.safetensors", "state.json"),
        pack_checkpoint(weights, state),
        strict=True,
    ):
        (newest / path).write_bytes(bytes(content))


def as_the_first_version(state: dict[str, Any]) -> None:
    del state["version"], state["dure"]
    state["workers"] = [[float(value) for value in one.values()] for one in state["workers"]]


def test_a_checkpoint_of_the_first_version_is_gone_on_with(tmp_path: Path) -> None:
    from small import same_bits, small_task

    strategy = dure.DataParallel(8)
    world = dure.Processes(2)
    whole = dure.train(small_task(), strategy, world, dure.Stop(steps=9))
    dure.train(small_task(), strategy, world, dure.Stop(steps=4), out=tmp_path)
    change_state(tmp_path, as_the_first_version)
    again = dure.resume(tmp_path, task=small_task(), stop=dure.Stop(steps=9))
    assert same_bits(whole, again)
    assert whole.summary["bytes_sent"] == again.summary["bytes_sent"]


def test_a_federation_of_the_first_version_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    from small import small_task

    dure.train(small_task(), dure.FedAvg(clients=3), stop=dure.Stop(rounds=2), out=tmp_path)
    change_state(tmp_path, as_the_first_version)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    written = (
        r"written by dure 0\.1\.0 or older, in version 1 of the format; this dure reads version 2"
    )
    with pytest.raises(dure.errors.RunFolderError, match=written):
        dure.resume(tmp_path, task=small_task(), stop=dure.Stop(rounds=4))
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_an_engine_that_is_gone_is_refused_by_its_name(tmp_path: Path) -> None:
    from small import small_task

    dure.train(small_task(), dure.FedAvg(clients=3), stop=dure.Stop(rounds=1), out=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["world"]["engine"] = "batched-threads"
    (tmp_path / "config.json").write_text(json.dumps(config))
    gone = r"does not match this version of dure: .*batched-threads"
    with pytest.raises(dure.errors.RunFolderError, match=gone):
        dure.resume(tmp_path, task=small_task())


def test_a_checkpoint_of_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    from small import small_task

    stop = dure.Stop(steps=4)
    dure.train(small_task(), dure.SingleWorker(8), stop=stop, out=tmp_path)
    change_state(tmp_path, lambda state: state.update(version=99, dure="7.5.0"))
    before = (tmp_path / "summary.json").read_bytes()
    with pytest.raises(
        dure.errors.RunFolderError,
        match=r"was written by dure 7\.5\.0, in version 99 of the format",
    ):
        dure.resume(tmp_path, task=small_task(), stop=dure.Stop(steps=9))
    assert (tmp_path / "summary.json").read_bytes() == before


@pytest.mark.filterwarnings("ignore:round 1")
@pytest.mark.parametrize("system", ["fed-avg", "fed-buff", "scaffold", "ditto"])
def test_a_federation_with_a_client_that_is_refused_goes_on_with_the_same_bits(
    system: str, tmp_path: Path
) -> None:
    from small import examples, same_bits, small_task

    data = examples()
    inputs = data.inputs.clone()
    inputs[data.keys.index("owner 1")] = float("nan")
    task = small_task(train=dure.Examples(inputs, data.targets, data.keys))
    settings: dict[str, Any] = {"clients": None, "partition": "natural-key"}
    strategy = {
        "fed-avg": dure.FedAvg(**settings),
        "fed-buff": dure.FedBuff(**settings, fraction=1.0, buffer=2),
        "scaffold": dure.Scaffold(**settings),
        "ditto": dure.Ditto(**settings, held_out=0.0),
    }[system]
    world = dure.Simulated(devices="lognormal:1")
    whole = dure.train(task, strategy, world, dure.Stop(rounds=7))
    dure.train(task, strategy, world, dure.Stop(rounds=3), out=tmp_path)
    again = dure.resume(tmp_path, task=task, stop=dure.Stop(rounds=7))
    assert same_bits(whole, again)
    assert whole.summary["facts"] == again.summary["facts"]
    (counted,) = whole.summary["facts"][0]["refused_clients"]
    assert counted[0] == 1
    assert [(s.samples, s.loss, s.numbers) for s in whole.history.steps] == [
        (s.samples, s.loss, s.numbers) for s in again.history.steps
    ]


def test_a_rule_that_nobody_finds_again_is_told_at_the_start(tmp_path: Path) -> None:
    from small import small_task

    class Own(dure.IID):
        """Of a function: no text leads to it."""

    strategy = dure.FedAvg(clients=3, partition=Own())
    with pytest.warns(UserWarning, match="can be resumed only as"):
        dure.train(small_task(), strategy, stop=dure.Stop(rounds=1), out=tmp_path)
    with pytest.raises(dure.errors.RunFolderError, match="give it with"):
        dure.resume(tmp_path, task=small_task(), stop=dure.Stop(rounds=2))
    more = dure.resume(tmp_path, task=small_task(), strategy=strategy, stop=dure.Stop(rounds=2))
    assert more.summary["steps"] == 2
