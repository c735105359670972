"""The ranks that torchrun starts: the same command, the same bits as on local processes, the same
errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import dure
from process_tree import end_family

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_torchrun_gives_the_bits_of_local_processes_also_where_a_run_goes_on(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    command = [*TORCHRUN, "-m", "dure", "train"]
    first = [*command, "digits", "data-parallel", "--steps", "30", "--out", str(out)]
    done = subprocess.run(first, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("run folder") == 1, "rank 0 alone talks to the user"
    again = [*command, "--resume", str(out), "--steps", "40", "--json"]
    done = subprocess.run(again, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert json.loads(done.stdout)["steps"] == 40, done.stdout
    local = dure.train(
        dure.load_task("digits"), dure.DataParallel(), dure.Processes(2), dure.Stop(steps=40)
    ).model.state_dict()
    trained = load_file(out / "model.safetensors")
    assert all(trained[name].equal(local[name]) for name in local)


def test_servers_and_workers_are_ranks_and_all_of_them_end_well(tmp_path: Path) -> None:
    out = tmp_path / "run"
    system = ["parameter-server", "--servers", "1", "--workers", "2", "--epochs", "1"]
    command = [*TORCHRUN[:-1], "4", "-m", "dure", "train", "digits", *system, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("run folder") == 1, "rank 0 alone talks to the user"
    simulated = dure.train(
        dure.load_task("digits"),
        dure.ParameterServer(servers=1, workers=2),
        dure.Simulated(),
        dure.Stop(epochs=1),
    ).model.state_dict()
    trained = load_file(out / "model.safetensors")
    assert all(trained[name].equal(simulated[name]) for name in simulated)


@pytest.mark.parametrize("system", ["parallel --pipeline 2", "zero --stage 3"])
def test_ranks_that_hold_parts_of_the_model_end_well(system: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        *TORCHRUN,
        "-m",
        "dure",
        "train",
        "digits",
        *system.split(),
        "--steps",
        "5",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    one = dure.train(
        dure.load_task("digits"), dure.SingleWorker(), stop=dure.Stop(steps=5)
    ).model.state_dict()
    trained = load_file(out / "model.safetensors")
    assert all(trained[name].allclose(one[name], atol=1e-5) for name in one)


def test_the_other_ranks_name_a_lost_one(tmp_path: Path) -> None:
    script = tmp_path / "victim.py"
    script.write_text(
        "import os, signal, sys, torch, dure\n"
        "from dure.collectives import all_reduce\n"
        "def program(place):\n"
        "    for step in range(1, 1000):\n"
        "        place.group.step = f'step {step}'\n"
        "        if step == 5 and place.group.rank == 2:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        all_reduce(torch.ones(1000), place.group)\n"
        "try:\n"
        "    dure.Torchrun(deadline=4).run(program, print)\n"
        "except dure.errors.PeerLostError as error:\n"
        "    open(f'{sys.argv[1]}/rank{os.environ[\"RANK\"]}', 'w').write(str(error))\n"
        "    os._exit(1)\n"
    )
    command = [*TORCHRUN[:-1], "4", str(script), str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until = time.monotonic() + 60
        while (
            process.poll() is None
            and time.monotonic() < until
            and len(list(tmp_path.glob("rank?"))) < 3
        ):
            time.sleep(0.05)
    finally:
        end_family(process)
    told = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert told, "somebody has to raise before torchrun ends the job"
    for text in told.values():
        assert text.startswith("rank 2 ")
        assert text.endswith("during ring all-reduce of step 5")


def test_outside_torchrun_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="not started by torchrun"):
        dure.Torchrun()


def test_a_comparison_goes_on_behind_a_system_that_fails(tmp_path: Path) -> None:
    command = [
        *TORCHRUN,
        "-m",
        "dure",
        "compare",
        "digits",
        "data-parallel",
        "local-sgd",
        "zero",
        "--lr",
        "1e30",
    ]
    command += ["--epochs", "1", "--json", "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    found = json.loads(done.stdout)
    assert found["runs"] == []
    assert len(found["failed"]) == 3
    assert all("lower the learning rate" in error for error in found["failed"].values())
