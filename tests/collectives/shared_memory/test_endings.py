"""How processes end that use the backend: quietly, on Ctrl-C with what Python does, and under
torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from thread_ranks import built


def script(folder: Path, text: str) -> list[str]:
    """The command that runs a script."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


@pytest.mark.parametrize(("core", "times"), [pytest.param("c", 4, marks=built), ("torch", 2)])
def test_processes_end_with_status_0_and_say_nothing(core: str, times: int, tmp_path: Path) -> None:
    """Each is forked from one that has torch loaded, and ends as an interpreter does."""
    command = script(
        tmp_path,
        f"""
        import gc, os, sys
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        import dure.collectives.shared_memory as memory

        def rank(number, file, ending):
            limit, options = timedelta(seconds=20), memory.Options(core={core!r})
            dist.init_process_group(
                "dure", init_method="file://" + file, rank=number, world_size=2,
                timeout=limit, pg_options=options
            )
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
            (dist.send if number == 0 else dist.recv)(tensor, 1 - number)
            if ending != "destroyed with calls under way":
                for work in works:
                    work.wait()
            if ending != "left":
                dist.destroy_process_group()

        gc.freeze()  # what torch has made is not looked through again in every child
        endings = ["destroyed", "destroyed", "destroyed with calls under way", "left"]
        for time in range({times}):
            ending = endings[time % 4]
            children = []
            for number in range(2):
                pid = os.fork()
                if pid == 0:
                    rank(number, sys.argv[1] + "/" + str(time), ending)
                    sys.exit()
                children.append(pid)
            for pid in children:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if status:
                    sys.exit("a process whose group was " + ending + " ended with " + str(status))
        """,
    )
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_ends_a_script_that_waits_as_it_ends_any_other(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import sys, time
        import torch, torch.distributed as dist
        import dure

        rank, folder = int(sys.argv[1]), sys.argv[2]
        store = "file://" + folder + "/store"
        dist.init_process_group("dure", init_method=store, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        open(folder + "/ready" + str(rank), "w").close()
        if rank == 0:
            time.sleep(1)  # the other one waits
        while True:
            dist.all_reduce(torch.ones(1))
        """,
    )
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("ready?"))) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)
        ranks[1].send_signal(signal.SIGINT)
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[1].returncode == -signal.SIGINT
    last = [
        text.splitlines()[-1].partition("]: ")[2] for text in told
    ]  # torch says [rank1]: before every line
    assert last[1] == "KeyboardInterrupt"
    assert ranks[0].returncode == 1
    assert last[0].startswith(
        "dure.errors.PeerLostError: rank 1 was interrupted (KeyboardInterrupt), during "
        "all_reduce(sum, 1 float32)"
    )


@built
def test_ctrl_c_while_a_waiting_rank_looks_at_its_peers_is_not_lost(tmp_path: Path) -> None:
    """C waits, and calls Python now and then: an error that is raised there cannot pass through C.

    What such a call returns is then whatever the one before has returned.
    """
    command = script(
        tmp_path,
        """
        import signal, sys, time
        import torch, torch.distributed as dist
        import dure

        rank, folder = int(sys.argv[1]), sys.argv[2]
        store = "file://" + folder + "/store"
        dist.init_process_group("dure", init_method=store, rank=rank, world_size=2)
        host = dist.group.WORLD._host
        plain, calls = host.tick, []

        def tick(waited):
            calls.append(waited)
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return plain(waited)

        if rank == 1:
            host.tick = tick
        else:
            time.sleep(1)
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.3 * (rank == 0))
        """,
    )
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[1].returncode == -signal.SIGINT
    assert told[1].splitlines()[-1].endswith("KeyboardInterrupt")
    assert "PeerLostError: rank 1 was interrupted (KeyboardInterrupt)" in told[0]


def test_a_script_under_torchrun_finds_its_ranks_and_uses_either_core(tmp_path: Path) -> None:
    _, path = script(
        tmp_path,
        """
        import os, sys
        import torch, torch.distributed as dist
        import dure
        from dure.collectives.shared_memory import Options, native

        dist.init_process_group("dure")
        rank = dist.get_rank()
        for core in ("auto", "torch", *(["c"] if native.library() else [])):
            group = dist.group.WORLD
            if core != "auto":
                group = dist.new_group(pg_options=Options(core=core))
            tensor = torch.full((300_000,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(3).all(), core
            open(sys.argv[1] + "/" + core + str(rank) + ".done", "w").close()
        dist.destroy_process_group()
        """,
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*torchrun, path, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.glob("*.done")}
    assert {"auto0.done", "auto1.done", "torch0.done", "torch1.done"} <= names
