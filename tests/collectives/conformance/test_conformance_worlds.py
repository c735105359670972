"""The backend as a job's own: registered by the import, joined, left, joined again, under torchrun,
from a script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness import need, same

import dure
from dure.contracts.world import RankContext
from process_tree import descendants

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def there() -> None:
    need("torch")


def summed(n: int = 100) -> None:
    tensor = torch.full((n,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    same(tensor, torch.full((n,), float(sum(range(dist.get_world_size())))))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_world_of_processes_stands_on_it(ranks: int) -> None:
    def program(context: RankContext) -> tuple[str, list[list[float]]]:
        summed()
        return dist.get_backend(), context.group.all_gather_values([float(context.group.rank)])

    assert dure.Processes(ranks, 30, "dure").run(program, lambda event: None) == (
        "dure",
        [[r] for r in range(ranks)],
    )


def test_it_is_left_and_joined_again() -> None:
    def program(context: RankContext) -> list[str]:
        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        backends = []
        for number, backend in enumerate(("dure", "cpu:dure", "gloo", "dure")):
            dist.destroy_process_group()
            assert not dist.is_initialized()
            again = dist.PrefixStore(f"again {number}", store)
            dist.init_process_group(backend, store=again, rank=rank, world_size=size)
            summed()
            pair = dist.new_group([0, 2], backend="dure")
            if rank != 1:
                dist.barrier(pair)
            backends.append(dist.get_backend())
        return backends  # torch's own name of the second differs between its versions

    backends = dure.Processes(3, 30, "dure").run(program, lambda event: None)
    assert [backend.removeprefix("cpu:") for backend in backends] == [
        "dure",
        "dure",
        "gloo",
        "dure",
    ]


def test_options_choose_the_core_of_a_world() -> None:
    def program(context: RankContext) -> None:
        from dure.collectives.shared_memory import Options

        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        for number, core in enumerate(("torch", "auto")):
            dist.destroy_process_group()
            again = dist.PrefixStore(f"with {number}", store)
            options = Options(core=core)  # type: ignore[arg-type]
            dist.init_process_group(
                "dure", store=again, rank=rank, world_size=size, pg_options=options
            )
            summed()

    dure.Processes(2, 30, "dure").run(program, lambda event: None)


def test_a_core_that_there_is_not_is_refused() -> None:
    from dure.collectives.shared_memory import Options

    def program(context: RankContext) -> None:
        dist.new_group([0, 1], backend="dure", pg_options=Options(core="rust"))  # type: ignore[arg-type]

    with pytest.raises(dure.errors.DureError, match="rust"):
        dure.Processes(2, 30).run(program, lambda event: None)


def python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_registers_it_whichever_comes_first_and_stays_light() -> None:
    python("import sys, dure; assert 'torch' not in sys.modules")
    known = "assert 'dure' in dist.Backend.backend_list"
    known += "; assert dist.Backend.default_device_backend_map['cpu'] == 'gloo'"
    python(f"import dure, torch.distributed as dist; {known}")
    python(f"import torch.distributed as dist, dure; {known}")


JOB = """
    import os, sys, torch, torch.distributed as dist, dure
    rank = int(sys.argv[1])
    dist.init_process_group("dure", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    tensor = torch.full((1_000_000,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.eq(1).all()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    if sys.argv[3] == "politely":
        dist.destroy_process_group()
    print("done", rank, flush=True)
"""


@pytest.mark.parametrize("how", ["politely", "without a word"])
def test_scripts_without_a_world_of_dure_use_it_and_end(how: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    commands = [
        [sys.executable, "-c", textwrap.dedent(JOB), str(rank), str(tmp_path / "f"), how]
        for rank in range(2)
    ]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for rank, job in enumerate(jobs):
        output, errors = job.communicate(timeout=120)
        assert (job.returncode, output) == (0, f"done {rank}\n"), errors
        assert "Error" not in errors, errors
    left = {name for name in set(os.listdir("/dev/shm")) - before if "dure" in name}
    assert not left
    assert not descendants(os.getpid()) & {job.pid for job in jobs}


def test_a_torchrun_job_trains_on_it(tmp_path: Path) -> None:
    train = [
        "-m",
        "dure",
        "train",
        "digits",
        "data-parallel",
        "--backend",
        "dure",
        "--steps",
        "3",
        "--json",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *train,
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert '"backend": "dure"' in (tmp_path / "run" / "config.json").read_text()
