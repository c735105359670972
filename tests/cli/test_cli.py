"""The command line: what it answers, and with which exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap

import pytest

from dure import catalog
from dure.cli import main as cli

TASK = """
    from functools import partial
    import os, signal
    import torch
    from torch import nn
    from torch.nn import functional as F
    import dure

    def data(n=20):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(n, 4, generator=generator), torch.arange(n) % 2

    def net():
        return nn.Linear(4, 2)

    def task(n: int = 20, lr: float = 0.1):
        optimizer = partial(torch.optim.SGD, lr=lr)
        return dure.Task(net, F.cross_entropy, data(n), data(n), optimizer, name="mine")

    fixed = task()

    def explodes():
        deep = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = partial(torch.optim.SGD, lr=1e30)
        return dure.Task(deep, F.cross_entropy, data(), data(), optimizer, name="explodes")

    def not_a_number():
        return dure.Task(net, lambda o, t: o.sum() * float("nan"), data(), None, name="nan")

    def own_error():
        def loss(outputs, targets):
            raise RuntimeError("two\\n  lines")
        return dure.Task(net, loss, data(), None, name="own error")

    def model_fails():
        def broken():
            raise TypeError("no weights")
        return dure.Task(broken, F.cross_entropy, data(), None, name="broken")

    def interrupts():
        def loss(outputs, targets):
            os.kill(os.getpid(), signal.SIGINT)
            return F.cross_entropy(outputs, targets)
        return dure.Task(net, loss, data(), None, name="interrupts")

    def odd_hints(n: "NoSuchType" = 20, **anything):
        return task(n)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory with a task file of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK))
    return tmp_path


@pytest.fixture
def dure(capsys):
    """Runs a command line; gives (exit status, standard output, standard error)."""

    def run(line: str):
        status = cli.main(line.split())
        return status, *capsys.readouterr()

    return run


def idx(magic: int, *shape: int, content: bytes) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + content


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("trian digits single-worker", "there is no command 'trian', did you mean 'train'?"),
        ("train digts single-worker", "there is no task 'digts', did you mean 'digits'?"),
        (
            "train digits singleworker",
            "there is no system 'singleworker', did you mean 'single-worker'?",
        ),
        ("compare digits fed-av,clients=3", "there is no system 'fed-av', did you mean 'fed-avg'?"),
        ("train digits", "name a task and a system"),
        ("compare", "name a task"),
        ("report", "name at least one run folder"),
        ("train mine.py:tusk single-worker", "has no 'tusk', did you mean 'task'?"),
        ("train none.py:task single-worker", "there is no file"),
        ("train mnist single-worker", "the task mnist needs --data DIR"),
        (
            "train mnist single-worker --data nowhere",
            "nowhere; it has to contain train-images-idx3-ubyte",
        ),
        ("train digits single-worker --bach-size 3", "--bach-size, 3, did you mean --batch-size?"),
        ("train digits single-worker --batch-size few", "Error parsing --batch-size"),
        (
            "train digits single-worker --batch-size 0",
            "batch_size is 0, but it has to be 1 or more",
        ),
        ("train digits data-parallel --batch-size 0 --workers 2", "batch_size is 0"),
        ("train digits fed-avg --batch-size 0", "batch_size is 0"),
        (
            "train digits fed-avg --fraction 0",
            "fraction is 0.0, but it has to be in (0, 1]",
        ),
        ("train digits fed-avg --fraction 1.5", "fraction is 1.5"),
        (
            "train digits fed-avg --partition label-shards:900",
            "1437 examples cannot be cut into 9000 shards",
        ),
        (
            "train digits fed-avg --partition dirichlett",
            "no partition 'dirichlett', did you mean 'dirichlet'?",
        ),
        (
            "train digits fed-avg --workers 2",
            "fed-avg counts clients, not workers: use --clients 2",
        ),
        (
            "train mine.py:task data-parallel --workers 21",
            "the run has 21 workers, but only 20 training examples",
        ),
        (
            "train digits single-worker --workers 2",
            "single-worker has one worker: leave out --workers 2",
        ),
        (
            "train digits single-worker --workers 0",
            "single-worker has one worker: leave out --workers 0",
        ),
        (
            "train digits single-worker --epochs -1",
            "epochs is -1.0, but it has to be greater than 0",
        ),
        ("train digits single-worker --rounds 3", "rounds do not apply: this system counts steps"),
        (
            "train digits single-worker --target accuracy",
            "write METRIC=VALUE, such as test_accuracy=0.99",
        ),
        (
            "train digits single-worker --target accuracy=0.9",
            "the target 'accuracy' is not measured; available metrics:",
        ),
        (
            "train digits single-worker --evaluate-every 0",
            "evaluate_every is 0, but it is a number of steps: 1 or more",
        ),
        ("train digits single-worker --out .", "is not empty"),
        ("train digits single-worker --out mine.py", "mine.py is a file, not a folder"),
        (f"train digits single-worker --out {'a' * 300}", "File name too long"),
        ("bench all-reduce --out mine.py", "mine.py is a file, but the result needs a folder"),
        (f"show {'a' * 300}", "File name too long"),
        ("train digits single-worker --out mine.py/run", "cannot create the run folder"),
        ("train --resume nowhere", "nowhere is not a run folder"),
        ("report nowhere", "nowhere is not a run folder"),
        (
            "compare digits data-parallel,all_reduc=ring",
            "has no field 'all_reduc', did you mean 'all_reduce'?",
        ),
        ("train mine.py:not_a_number single-worker --json", "the loss is nan at step 1 on rank 0"),
        (
            "train mine.py:explodes single-worker --batch-size 5 --json",
            "at step 2 on rank 0: lower the learning rate",
        ),
    ],
)
def test_bad_input_is_answered_by_one_line_and_status_2(dure, line, complaint):
    status, out, err = dure(line)
    assert complaint in err
    assert (status, out, err.count("\n"), err[:6]) == (2, "", 1, "dure: ")


@pytest.mark.parametrize("cut", [3, 20, -1])
def test_a_corrupt_data_file_is_answered_by_one_line_that_names_it(dure, here, cut):
    pictures, labels = (
        idx(0x803, 2, 28, 28, content=bytes(2 * 784)),
        idx(0x801, 2, content=bytes(2)),
    )
    for part in ("train", "t10k"):
        (here / f"{part}-images-idx3-ubyte").write_bytes(
            pictures[:cut] if part == "train" else pictures
        )
        (here / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    status, out, err = dure("train mnist single-worker --data .")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "train-images-idx3-ubyte" in err
    assert "download the file again" in err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            "train mine.py:own_error single-worker --json",
            "rank 0 failed in step 1: RuntimeError: two lines (--debug",
        ),
        (
            "train mine.py:own_error fed-avg --json",
            "client 0 failed in round 1: RuntimeError: two lines (--debug",
        ),
        (
            "train mine.py:model_fails single-worker",
            "TypeError: no weights (--debug shows the traceback)",
        ),
    ],
)
def test_a_failure_of_the_user_s_code_is_one_line_and_status_1_and_a_traceback_on_demand(
    dure, line, complaint
):
    status, out, err = dure(line)
    assert complaint in err
    assert (status, out, err.count("\n")) == (1, "", 1)
    status, out, err = dure(f"{line} --debug")
    assert (status, out) == (1, "")
    assert "Traceback (most recent call last)" in err
    assert 'mine.py", line' in err


def test_json_is_one_object_on_standard_output_and_nothing_else(dure, here):
    status, out, err = dure(
        "train mine.py:task single-worker --n 24 --lr 0.5 --epochs 2 --batch-size 8 --json --out "
        "run"
    )
    assert (status, err) == (0, "")
    summary = json.loads(out)
    assert (summary["steps"], summary["samples"], summary["ended"]) == (6, 48, "epochs")
    assert summary.pop("folder") == "run"
    assert summary == json.loads((here / "run" / "summary.json").read_text())
    config = json.loads((here / "run" / "config.json").read_text())
    assert config["task"]["options"] == {"n": 24, "lr": 0.5}


def test_a_run_says_what_came_out_and_where_it_lies(dure, here):
    status, out, err = dure(
        "train mine.py:fixed fed-avg --clients 4 --rounds 2 --partition label-shards:2"
    )
    assert (status, out) == (0, "")
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("mine-fed-avg-")
    assert f"run folder: runs/{folder.name}" in err
    assert "100% training: round 2" in err
    config = json.loads((folder / "config.json").read_text())
    assert config["strategy"]["partition"] == "label-shards:2"
    assert config["stop"] == {
        "epochs": None,
        "steps": None,
        "rounds": 2,
        "seconds": None,
        "target": None,
        "bytes": None,
        "patience": None,
        "monitor": None,
        "min_delta": 0.0,
    }


def test_a_run_ends_when_so_many_bytes_have_travelled(dure, here):
    _, out, _ = dure(
        "train mine.py:fixed fed-avg --clients 4 --bytes 3kB --transfer-budget 1MB --json --out run"
    )
    summary = json.loads(out)
    assert summary["ended"] == "bytes"
    assert summary["bytes_sent"] >= 3_000
    config = json.loads((here / "run" / "config.json").read_text())
    assert config["stop"]["bytes"] == 3_000
    assert config["world"]["transfer_budget"] == 1_000_000
    status, _, err = dure("train mine.py:fixed fed-avg --bytes lots")
    assert status == 2
    assert "'lots' is not a size: write bytes, 100MB or 1.5GB" in err


def test_ten_epochs_are_trained_if_nothing_is_said(dure):
    _, out, _ = dure("train mine.py:task single-worker --json")
    assert json.loads(out)["epochs"] == 10


def test_several_targets_may_be_given(dure, here):
    dure(
        "train mine.py:task single-worker --epochs 1 --target test_accuracy=2 test_loss=0 --json "
        "--out run"
    )
    stop = json.loads((here / "run" / "config.json").read_text())["stop"]
    assert stop["target"] == {"test_accuracy": 2.0, "test_loss": 0.0}


def test_two_workers_train_as_processes(dure):
    status, out, _ = dure(
        "train mine.py:task data-parallel --workers 2 --all-reduce master --steps 3 --json"
    )
    assert (status, json.loads(out)["workers"]) == (0, 2)


def test_a_run_goes_on_where_it_ended(dure, here):
    dure("train mine.py:task single-worker --steps 2 --json --out run")
    status, out, err = dure("train --resume run --steps 5 --json")
    assert (status, err, json.loads(out)["steps"]) == (0, "", 5)
    status, out, _ = dure("train --resume=run --json")
    assert (status, json.loads(out)["steps"]) == (0, 5)
    (here / "run" / "config.json").write_text("{}")
    status, out, err = dure("train --resume run")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "config.json is damaged" in err


def test_ctrl_c_ends_a_run_with_status_130_and_says_how_to_go_on(dure):
    status, _, err = dure("train mine.py:interrupts single-worker --epochs 9999 --out run")
    assert status == 130
    assert "interrupted; resume with: dure train --resume run" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_systems_are_compared_and_reported(dure, here):
    line = (
        "compare mine.py:task single-worker fed-avg,clients=2,partition=label-shards:1 "
        "--epochs 2 --json --out all"
    )
    status, out, _ = dure(line)
    compared = json.loads(out)
    assert status == 0
    assert [run["label"] for run in compared["runs"]] == [
        "single worker",
        "FedAvg label-shards:1 K=2 B=32",
    ]
    assert (compared["failed"], compared["report"]) == ({}, "all/report.html")
    status, out, err = dure("report all --out again.html")
    assert (status, out, err) == (0, "again.html\n", "")
    status, out, _ = dure("report all/single-worker all/fedavg-label-shards-1-k-2-b-32")
    assert (status, out) == (0, "all/single-worker/report.html\n")
    assert (here / "all" / "single-worker" / "report.html").exists()


def test_a_comparison_with_a_failure_says_which_and_why(dure):
    status, out, err = dure(
        "compare mine.py:own_error single-worker fed-avg --epochs 1 --json --out all"
    )
    assert status == 1
    assert json.loads(out)["runs"] == []
    assert "dure: single worker: rank 0 failed in step 1: RuntimeError: two" in err
    assert "dure: FedAvg iid B=32: client 0 failed in round 1" in err


def test_a_task_whose_hints_cannot_be_read_can_be_trained(dure):
    status, out, _ = dure("train mine.py:odd_hints single-worker --n 12 --epochs 1 --json")
    assert (status, json.loads(out)["samples"]) == (0, 12)


# What a task adds does not depend on the system, but for where its data lie.
@pytest.mark.parametrize(
    ("task", "system"),
    [("digits", system) for system in catalog.SYSTEMS]
    + [
        (task, system)
        for task in catalog.TASKS
        for system in ("single-worker", "parallel", "fed-avg")
        if task != "digits"
    ],
)
def test_help_lists_the_options_of_every_task_and_system(dure, task, system):
    status, out, err = dure(f"train {task} {system} --help")
    assert (status, err) == (0, "")
    flags = set(re.findall(r"--[a-z-]+", out))
    assert {"--batch-size", "--epochs", "--seed", "--out", "--lr", "--json"} <= flags
    assert ("--data" in flags) == (task != "digits" or system == "parallel")


@pytest.mark.parametrize("line", ["--help", "-h", "", "help", "train --help"])
def test_the_help_names_every_task_and_system(dure, line):
    status, out, err = dure(line)
    assert (status, err) == (0, "")
    assert all(name in out for name in [*catalog.TASKS, *catalog.SYSTEMS])


@pytest.mark.parametrize(
    "command",
    ["compare", "report", "bench", "compare digits", "bench all-reduce", "train --resume"],
)
def test_every_command_lists_its_options(dure, command):
    status, out, err = dure(f"{command} --help")
    assert (status, err) == (0, "")
    assert ("--json" if "train" in command else "--out") in out


def test_the_version_is_told(dure):
    assert dure("--version")[1].startswith("dure 0.")


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "train digts single-worker",
        "train digits fed-av",
        "compare digits zzz",
        "tran",
    ],
)
def test_help_and_mistyped_names_are_answered_without_torch(line):
    program = (
        f"import sys; from dure.cli.main import main; main({line.split()!r}); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "dure", "train", "x", "y"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert os.listdir() == ["mine.py"]


def test_standard_output_that_cannot_be_written_is_said_in_a_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dure", "systems"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("dure: cannot write the output: No space left")
    assert done.stderr.count("\n") == 1
