"""Runs that cannot fit into memory are refused before they start, under limits that are real."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dure
import dure.run.memory_check
from dure.machine.limits import RemainingMemory
from dure.memory.formula import (
    TrainingMemory,
    bytes_of,
    divided_shares,
    tensors_of,
    training_memory_of,
)
from dure.memory.mapped import Disk, mapped
from dure.run.memory_check import check_fits, held_by
from small import network, small_task

linux = pytest.mark.skipif(platform.system() != "Linux", reason="limits are read from /proc")

SCRIPT = """
import contextlib, json, os, re, resource, sys
from functools import partial
from pathlib import Path
import torch, dure
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
NEED = 4 * 4 * 2500 * 2500 * 4  # four layers, AdamW

def model():
    return nn.Sequential(*(nn.Linear(2500, 2500) for _ in range(4)))

task = dure.Task(model, F.cross_entropy, (torch.randn(4, 2500), torch.arange(4)),
                 optimizer=partial(torch.optim.AdamW, lr=1e-3))

def outcome(**settings):
    try:
        dure.train(task, dure.SingleWorker(**settings), stop=dure.Stop(steps=1))
    except ValueError as error:
        return str(error)
    return "trained"

def tried(name):
    # What becomes of it as it is, and with what is then named, if something is.
    found[name, "refused"] = told = outcome()
    named = re.search("--offload (\\S+)", told)
    if named:
        found[name, "named"] = outcome(offload=named[1])

def used(field):
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()

@contextlib.contextmanager
def limited(kind, field, more):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (used(field) + more, before[1]))
    yield
    resource.setrlimit(kind, before)

found = {}
# What a first run loads.
small = dure.Task(lambda: nn.Linear(2500, 4), F.cross_entropy, task.train)
dure.train(small, dure.SingleWorker(), stop=dure.Stop(steps=1))
with limited(resource.RLIMIT_AS, 0, NEED // 10):
    found["as", "unmade"] = outcome()
kinds = (("as", resource.RLIMIT_AS, 0), ("data", resource.RLIMIT_DATA, 5))
for name, kind, field in kinds:
    with limited(kind, field, NEED * 3 // 4):
        tried(name)
group = Path(sys.argv[1])
with contextlib.suppress(OSError):
    group.mkdir()
    limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
    limit.write_text(str(NEED * 3 // 4))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    tried("group")
    limit.write_text(str(NEED * 3))
    found["group", "fits"] = outcome()
for name, kind, field in kinds:
    with limited(kind, field, NEED * 2):
        found[name, "fits"] = outcome()
print(json.dumps([[*key, value] for key, value in found.items()]))
"""


@linux
def test_limits_of_the_process_and_of_its_group_are_kept() -> None:
    mount = Path("/sys/fs/cgroup/memory")
    group = (mount if mount.is_dir() else mount.parent) / f"dure-test-fits-{os.getpid()}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(group)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        if group.is_dir():
            group.rmdir()
    assert done.returncode == 0, done.stderr
    told = {(what, how): text for what, how, text in json.loads(done.stdout.splitlines()[-1])}
    whose = {"as": "RLIMIT_AS", "data": "RLIMIT_DATA", "group": f"control group {group}"}
    for (what, how), text in told.items():
        if how in ("fits", "named"):
            assert text == "trained", (what, how)
        elif how == "unmade":
            assert "the model does not fit into memory" in text
            assert whose[what] in text
        else:
            assert "does not fit into memory: the worker needs 450 MB and the activations" in text
            held = "weights 100 MB, gradients 100 MB, optimizer's state 200 MB, update 50 MB"
            assert f"({held})" in text
            assert whose[what] in text
            assert "tensor-parallel or pipeline with --workers " in text
            # What lies in files is addressed as ever.
            assert ("or --offload optimizer" in text) == (what != "as")


def refusal(free: int, strategy: dure.Strategy, world: dure.World, **room: bool) -> str | None:
    """What is said of a model of 100 MB trained with momentum where so many MB are free."""

    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(5000, 5000, bias=False)

    task = small_task(model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    here = [RemainingMemory(free * 10**6, 0, "a limit", shared=room.pop("shared", False), **room)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dure.run.memory_check, "remaining_memory", lambda: here)
        patch.setattr(dure.run.memory_check, "free_in_heap", lambda: 0)
        try:
            check_fits(task, strategy, world, model())
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("strategy", "each"),
    [
        (dure.SingleWorker(), 300),
        (dure.SingleWorker(offload="optimizer"), 200),
        (dure.SingleWorker(offload="optimizer,parameters,gradients"), 0),
        (dure.DataParallel(), 300),
        (dure.LocalSGD(), 300),
        (dure.ZeRO(stage=1), 250),
        (dure.ZeRO(stage=2), 200),
        (dure.ZeRO(stage=3), 150),
        (dure.TensorParallel(), 150),
        (dure.Pipeline(), 150),
        (dure.Parallel(mesh=dure.Mesh(data=2), zero=1), 250),
    ],
)
def test_what_a_worker_holds_has_to_fit_and_what_fits_is_not_refused(strategy, each) -> None:
    alone = isinstance(strategy, dure.SingleWorker)
    world = dure.Processes(1 if alone else 2)
    assert refusal(each, strategy, world) is None
    if each:
        told = refusal(each - 1, strategy, world)
        assert told is not None
        assert f"needs {each} MB and the activations" in told
    # Ranks of one machine have its memory together.
    if not alone:
        assert refusal(2 * each, strategy, world, shared=True) is None
        told = refusal(2 * each - 1, strategy, world, shared=True)
        assert told is not None
        assert f", {2 * each} MB together, but only" in told
        assert "each on its own machine" in told


def test_what_would_do_has_room_to_spare() -> None:
    for free, workers, each, offload in (
        (299, 4, 75, "optimizer"),
        (250, 8, 37.5, "optimizer,parameters"),
    ):
        told = refusal(free, dure.SingleWorker(), dure.Processes(1))
        assert told is not None
        assert f"--workers {workers} ({each} MB each)" in told
        assert told.endswith(f"or --offload {offload} would fit")
    told = refusal(0, dure.SingleWorker(offload="optimizer"), dure.Processes(1))
    assert told is not None
    assert "workers" not in told
    # Nobody knows what clients, or servers of parameters, hold at least.
    assert refusal(1, dure.FedAvg(clients=2), dure.Simulated()) is None


def test_a_model_is_counted_as_it_is() -> None:
    model = network()
    need = training_memory_of(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert (
        need.of(divided_shares(1))
        == TrainingMemory(215 * 8, 215 * 8, 215 * 8)
        == need._replace(passing=0)
    )
    assert training_memory_of(model, torch.optim.SGD).state == 0
    adam = training_memory_of(model, torch.optim.Adam)
    # Two numbers a weight, and a counter of the steps for each of six parameters.
    assert adam.state == 2 * 215 * 8 + 6 * 4
    # A weight decayed is one number more; two lie between Adam's moments and its update.
    largest, everything = 12 * 8 * 8, 215 * 8
    for optimizer, passing in (
        (torch.optim.SGD, 0),
        (partial(torch.optim.SGD, weight_decay=0.1), largest),
        (torch.optim.Adam, 2 * largest),
        (partial(torch.optim.Adam, foreach=True), everything),
        (partial(torch.optim.AdamW, fused=True), 0),
    ):
        assert training_memory_of(model, optimizer).passing == passing
    tied = nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Linear(5, 7, bias=False))
    tied[1].weight = tied[0].weight
    assert bytes_of(tensors_of(tied)) == 7 * 5 * 4
    assert training_memory_of(tied, torch.optim.SGD).gradients == 0
    tied.requires_grad_(False)
    assert training_memory_of(tied, torch.optim.Adam) == TrainingMemory(7 * 5 * 4, 0, 0)
    assert training_memory_of(model, partial(torch.optim.Adam, nobody_knows=1)).state == 0
    with mapped(Disk(), least=0):
        model = network()
    assert held_by(model, addressed=False) == 0
    assert held_by(model, addressed=True) == held_by(network(), addressed=False) == 215 * 8


@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 8))
def test_shares_of_all_ranks_are_the_whole_at_least(parts, stage, ranks) -> None:
    shares = divided_shares(parts, stage, ranks)
    for share, divides in zip(shares, (3, 2, 1, 1), strict=True):
        assert share * parts * (ranks if stage >= divides else 1) == 1
