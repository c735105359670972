"""Ranks as processes: they start, fail and end in every way, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
from dure.collectives import all_reduce
from dure.contracts.world import RankContext
from dure.errors import DureError, LossNotFiniteError, PeerLostError, WorkerFailedError
from dure.worlds.processes import world
from dure.worlds.processes.fork_server import ForkServer, server
from process_tree import descendants
from small import same_bits, small_task


def run(ranks: int, program: Callable[[RankContext], Any], deadline: float = 20) -> Any:
    return dure.Processes(ranks, deadline).run(program, lambda event: None)


def endless(context: RankContext, fate: Callable[[RankContext], None], fatal_step: int = 5) -> None:
    """Reduces for ever; at `fatal_step` `fate` decides what happens to a rank."""
    step = 0
    while True:
        step += 1
        context.group.step = f"step {step}"
        if step == fatal_step:
            fate(context)
        all_reduce(torch.ones(1_000), context.group, "ring")


def test_every_rank_has_its_number_its_threads_and_the_parents_folder(tmp_path: Path) -> None:
    def program(context: RankContext) -> list[float]:
        facts = [
            float(context.group.rank),
            float(torch.get_num_threads()),
            float(os.stat(".").st_ino),
        ]
        return [fact for row in context.group.all_gather_values(facts) for fact in row]

    facts = run(2, program)
    assert facts[0::3] == [0, 1]
    assert all(threads == max(1, len(os.sched_getaffinity(0)) // 2) for threads in facts[1::3])
    assert all(inode == os.stat(".").st_ino for inode in facts[2::3])


def test_a_rank_collects_no_garbage_among_what_was_imported_before_it() -> None:
    """Else it would write into every object, and have the pages for itself."""

    def program(context: RankContext) -> list[float]:
        # All of torch is frozen; what the rank has made itself is not.
        kinds = (type(one) for one in gc.get_objects() if isinstance(one, type(torch)))
        return [float(gc.get_freeze_count()), float(sum(1 for _ in kinds))]

    frozen, modules = run(2, program)
    assert frozen > 100_000
    assert modules < 100


def test_nobody_can_reach_the_ranks_over_the_network() -> None:
    """Nor do they ask a name server what their own machine is called: there is no address to ask
    for."""

    def program(context: RankContext) -> list[float]:
        own = {os.stat(one).st_ino for one in Path("/proc/self/fd").iterdir() if one.exists()}
        tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6")]
        known = {
            int(row.split()[9])
            for table in tables
            if table.exists()
            for row in table.read_text().splitlines()[1:]
        }
        return [
            count
            for row in context.group.all_gather_values([float(len(own & known))])
            for count in row
        ]

    assert run(3, program) == [0.0, 0.0, 0.0]


def test_what_a_rank_prints_reaches_the_user(capfd: pytest.CaptureFixture[str]) -> None:
    def greet(context: RankContext) -> None:
        print(f"hello from {context.group.rank}\n", end="", flush=True)  # one write each

    run(2, greet)
    assert sorted(capfd.readouterr().out.split("\n"))[1:] == ["hello from 0", "hello from 1"]


def test_events_of_rank_0_are_reported_in_order() -> None:
    seen: list[int] = []

    def program(context: RankContext) -> None:
        if context.group.rank == 0:
            for step in range(5):
                context.report({"unit": "step", "step": step})

    dure.Processes(2).run(program, lambda event: seen.append(event["step"]))
    assert seen == [0, 1, 2, 3, 4]


def test_an_error_of_the_users_code_arrives_with_its_rank_and_traceback() -> None:
    def broken(context: RankContext) -> None:
        if context.group.rank == 1:
            raise ZeroDivisionError("my own mistake")
        all_reduce(torch.ones(10), context.group, "ring")

    with pytest.raises(
        WorkerFailedError, match=r"rank 1 failed.*ZeroDivisionError: my own mistake"
    ) as caught:
        run(3, broken)
    assert "raise ZeroDivisionError" in caught.value.traceback


def test_an_error_in_a_model_names_rank_and_step() -> None:
    class Broken(torch.nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            if self.calls == 4 and torch.distributed.get_rank() == 1:
                raise RuntimeError("forward is broken")
            return super().forward(inputs)

    task = small_task(model=lambda: Broken(6, 3).double())
    with pytest.raises(
        WorkerFailedError, match="rank 1 failed in step 4: RuntimeError: forward is broken"
    ) as caught:
        dure.train(task, dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=10))
    assert "forward is broken" in caught.value.traceback


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_with_operation_and_step(victim: int) -> None:
    def fate(context: RankContext) -> None:
        if context.group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLostError) as caught:
        run(4, lambda context: endless(context, fate))
    assert caught.value.ranks == (victim,)
    assert (
        str(caught.value)
        == f"rank {victim} was killed by SIGKILL, during ring all-reduce of step 5"
    )


def test_a_rank_that_exits_is_named_with_its_status() -> None:
    def fate(context: RankContext) -> None:
        if context.group.rank == 1:
            os._exit(7)

    with pytest.raises(
        PeerLostError, match="rank 1 exited with status 7, during ring all-reduce of step 5"
    ):
        run(3, lambda context: endless(context, fate))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_within_the_deadline(victim: int) -> None:
    def fate(context: RankContext) -> None:
        if context.group.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(PeerLostError) as caught:
        run(4, lambda context: endless(context, fate), deadline=4)
    assert caught.value.ranks == (victim,)
    assert "fell silent (nothing for 3 s), during ring all-reduce of step 5" in str(caught.value)


@pytest.mark.parametrize("algorithm", ["ring", "master", "native"])
def test_a_rank_killed_in_training_ends_every_strategy(algorithm: str) -> None:
    class Mortal(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training and torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(inputs)

    task = small_task(model=lambda: Mortal(6, 3).double())
    strategy = dure.DataParallel(8, algorithm)  # type: ignore[arg-type]
    with pytest.raises(PeerLostError, match=r"rank 1 was killed by SIGKILL, during .* of step 1"):
        dure.train(task, strategy, dure.Processes(3, 20), dure.Stop(steps=10))


def test_a_loss_that_is_not_finite_names_its_rank_and_step_on_all() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = torch.nn.functional.cross_entropy(outputs, targets)
        return value / 0 if outputs.requires_grad and torch.distributed.get_rank() == 1 else value

    with pytest.raises(LossNotFiniteError, match="the loss is inf at step 1 on rank 1"):
        dure.train(
            small_task(loss=loss), dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=10)
        )


def test_the_world_can_be_used_again_after_a_failure_and_many_times() -> None:
    def fate(context: RankContext) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLostError):
        run(2, lambda context: endless(context, fate))
    pid = server.pid
    runs = [
        dure.train(small_task(), dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=4))
        for _ in range(3)
    ]
    assert all(same_bits(runs[0], other) for other in runs)
    assert server.pid == pid


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A fork server for one test: that of all tests has loaded what they have imported, and another
    in its place would have to do so again."""
    own = ForkServer()
    monkeypatch.setattr(own, "_for_ranks", lambda name: False)
    monkeypatch.setattr(world, "server", own)
    yield own
    own.stop()


def test_the_fork_server_is_started_anew_when_it_was_killed(own_server: ForkServer) -> None:
    run(2, lambda context: None)
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert run(2, lambda context: context.group.size) == 2


def test_ranks_find_imported_what_their_parent_has_imported() -> None:
    import dure.averaging.local_sgd
    import dure.cli.main  # noqa: F401

    def at_its_start(context: RankContext) -> list[str]:
        import sys

        wanted = ["dure.averaging.local_sgd", "pytest", "dure.cli.main", "this"]
        return [name for name in wanted if name in sys.modules]

    server.preload("pytest", "this")  # the parent has not imported `this`
    assert run(2, at_its_start) == ["dure.averaging.local_sgd", "pytest"]


def test_a_fork_server_imports_at_its_start_what_it_begins_with(own_server: ForkServer) -> None:
    own_server.import_at_start("tabnanny", "nowhere_to_be_found")
    assert run(2, lambda place: "tabnanny" in sys.modules)


def test_the_fork_server_lives_on_when_it_cannot_import_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", sys)
    server.preload("nowhere_to_be_found")
    assert run(2, lambda context: context.group.size) == 2


def test_what_a_script_sets_for_the_whole_process_holds_on_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SET_AFTER_THE_SERVER_STARTED", "yes")
    run(2, lambda context: None)
    torch.set_default_dtype(torch.float64)
    try:
        seen = run(
            2,
            lambda context: (torch.zeros(1).dtype, os.environ.get("SET_AFTER_THE_SERVER_STARTED")),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == (torch.float64, "yes")


def test_a_dead_rank_whose_child_lives_on_is_noticed_all_the_same() -> None:
    def fate(context: RankContext) -> None:
        if context.group.rank == 1:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 was killed by SIGKILL"):
        run(2, lambda context: endless(context, fate), deadline=4)
    assert time.monotonic() - started < 19, (
        "before the child, which holds the rank's sockets, has ended"
    )


def test_an_error_with_a_long_message_still_arrives() -> None:
    def broken(context: RankContext) -> None:
        raise ValueError("long " * 100_000)

    with pytest.raises(
        WorkerFailedError, match="rank 0 failed in the start: ValueError: long long"
    ):
        run(2, broken)


def test_what_cannot_travel_is_told_before_anything_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(DureError, match=r"cannot be sent to its ranks: TypeError: .*lock"):
        run(2, lambda context: lock.locked())


def test_a_question_interrupted_by_ctrl_c_leaves_no_answer_behind() -> None:
    script = """
import os, signal, threading, time
import dure
from dure.worlds.processes.fork_server import server
try:
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    server.ready()
    print("was too fast to be interrupted")
    time.sleep(60)
except KeyboardInterrupt:
    pass
print(dure.Processes(2, 20).run(lambda place: place.group.size, print))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr


SCRIPT = """
    import os, sys, time, torch, dure
    from torch import nn
    from torch.nn import functional as F

    class Slow(nn.Linear):
        def forward(self, inputs):
            time.sleep(0.01)
            return super().forward(inputs)

    data = (torch.randn(64, 4), torch.randint(0, 2, (64,)))
    task = dure.Task(model=lambda: Slow(4, 2), loss=F.cross_entropy, train=data, test=data)

    def told(event):
        if event["step"] > 3:
            print("running", flush=True)

    stop = dure.Stop(epochs=1e6)
    world = dure.Processes(2)
    run = dure.train(task, dure.DataParallel(8), world, stop, out=sys.argv[1], on_progress=told)
    print("ended by", run.summary["ended"], "steps", run.summary["steps"] > 3, flush=True)
"""


@pytest.fixture
def running_script(tmp_path: Path) -> Any:
    """A user's script without a main guard, in the middle of training on two ranks."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(tmp_path / "run")]
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_killing_the_parent_leaves_no_process(
    running_script: subprocess.Popen[str], tmp_path: Path
) -> None:
    family = descendants(running_script.pid)
    assert len(family) == 3, "a fork server and two ranks"
    assert len(list((tmp_path / "temporary").glob("dure-*/store"))) == 1
    running_script.kill()
    running_script.wait()
    until = time.monotonic() + 10
    while time.monotonic() < until and any(alive(pid) for pid in family):
        time.sleep(0.05)
    assert not [pid for pid in family if alive(pid)]
    assert not list((tmp_path / "temporary").glob("dure-*"))


def test_ctrl_c_ends_the_run_and_keeps_what_was_done(
    running_script: subprocess.Popen[str], tmp_path: Path
) -> None:
    running_script.send_signal(signal.SIGINT)
    output, _ = running_script.communicate(timeout=60)
    assert output.splitlines()[-1] == "ended by interrupt steps True"
    assert (tmp_path / "run" / "summary.json").exists()
    assert list((tmp_path / "run" / "checkpoint").iterdir())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_world_without_ranks_or_patience_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0, but it has to be 1 or more"):
        dure.Processes(0)
    with pytest.raises(ValueError, match="deadline"):
        dure.Processes(2, deadline=0)


def test_the_backend_of_the_ranks_is_the_one_asked_for() -> None:
    assert run(2, lambda context: torch.distributed.get_backend()) == "dure"
    processes = dure.Processes(2, backend="gloo")
    assert (
        processes.run(lambda context: torch.distributed.get_backend(), lambda event: None) == "gloo"
    )
    with pytest.raises(ValueError, match="there is no backend 'nccl': choose gloo or dure"):
        dure.Processes(2, backend="nccl")  # type: ignore[arg-type]


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.2])
def test_ctrl_c_while_the_fork_server_starts_is_the_parents_alone(pause: float) -> None:
    script = """
        import sys
        from dure.worlds.processes.fork_server import server
        try:
            server.start()
            print("started", flush=True)
            server.ready()
            sys.stdin.read()
        except KeyboardInterrupt:
            sys.exit(130)
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(command, **pipes, start_new_session=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        time.sleep(pause)
        os.killpg(parent.pid, signal.SIGINT)
        _, said = parent.communicate(timeout=60)
    assert (parent.returncode, said) == (130, b"")


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_what_ends_its_parent_leaves_the_fork_server_to_clear_up(sent: int) -> None:
    """A closed terminal sends SIGHUP to all, and the server has the folders to remove."""
    server.ready()
    before = server.pid
    assert before is not None
    os.kill(before, sent)
    run(2, lambda context: None)
    assert server.pid == before
