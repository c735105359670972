"""A world of threads: devices, interrupts, the command line, and what does not live there."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
from dure.cli.main import main
from dure.report.page import write_report
from dure.report.read import read_run
from dure.report.repeat_command import command
from small import largest_difference, small_task

CUDA = torch.cuda.device_count() > 0


def test_a_thread_has_a_device_and_named_ones_are_taken_in_turn() -> None:
    world = dure.Threads(3, ("cpu",))
    assert world.devices == ("cpu", "cpu", "cpu")
    assert (world.workers, world.describe()) == (3, "3 threads")
    assert dure.Threads(devices=("cpu", "cpu")).workers == 2
    assert dure.Threads(1, ("cpu",)).describe() == "1 thread"


@pytest.mark.skipif(CUDA, reason="there are CUDA devices here")
def test_without_gpus_there_is_a_thread_a_core() -> None:
    assert dure.Threads().devices == ("cpu",) * max(2, len(os.sched_getaffinity(0)))
    with pytest.raises(
        ValueError, match=r"this machine has no CUDA device, so cuda:0 cannot be used: use cpu"
    ):
        dure.Threads(2, ("cuda:0",))


@pytest.mark.needs_cuda
def test_gpus_are_taken_in_turn_where_there_are() -> None:
    count = torch.cuda.device_count()
    assert dure.Threads(count + 1).devices == (
        *(f"cuda:{index}" for index in range(count)),
        "cuda:0",
    )
    with pytest.raises(ValueError, match=f"there is no cuda:{count} here"):
        dure.Threads(1, (f"cuda:{count}",))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0,), "threads is 0"),
        ((1, ("cpu", "cpu")), "2 devices are too many for 1 threads"),
        ((1, ("gpu",)), "'gpu' is not a device: write cpu, cuda, or cuda:1"),
        ((1, ("meta",)), "this machine has no meta device, so meta cannot be used"),
    ],
)
def test_worlds_that_cannot_be_are_refused(arguments: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dure.Threads(*arguments)


@pytest.mark.parametrize(
    ("strategy", "world", "complaint"),
    [
        (
            dure.SingleWorker(8),
            dure.Threads(1),
            "SingleWorker does not run in Threads; it needs a world of ranks",
        ),
        (
            dure.FedAvg(4),
            dure.Threads(2),
            "FedAvg does not run in Threads; it needs a world of clients: Simulated",
        ),
        (
            dure.DataParallel(8),
            dure.Simulated(),
            r"a world of ranks: .*, or of threads: Threads\(n\)",
        ),
    ],
)
def test_systems_say_in_which_worlds_they_live(strategy: Any, world: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dure.train(small_task(), strategy, world, dure.Stop(steps=1))


@pytest.mark.needs_cuda
@pytest.mark.parametrize(
    "strategy", [dure.DataParallel(8), dure.LayersPerCore(8, 2), dure.Hogwild(8)]
)
def test_threads_may_share_a_gpu(strategy: Any) -> None:
    stop = dure.Stop(epochs=2)
    run = dure.train(small_task(), strategy, dure.Threads(2, ("cuda:0",)), stop, seed=3)
    alone = dure.train(small_task(), dure.SingleWorker(8, "cuda"), stop=stop, seed=3)
    assert run.summary["world"] == "2 threads on cuda:0"
    assert largest_difference(run, alone) < (1.0 if strategy.name == "hogwild" else 1e-10)


def test_ctrl_c_ends_the_run_after_its_step(tmp_path: Path) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if event["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    run = dure.train(
        small_task(),
        dure.DataParallel(8),
        dure.Threads(2),
        dure.Stop(steps=10**6),
        out=tmp_path,
        evaluate_every=1,
        on_progress=interrupt,
    )
    assert run.summary["ended"] == "interrupt"
    assert 3 <= run.summary["steps"] < 100
    assert (tmp_path / "checkpoint").is_dir()


def test_a_second_ctrl_c_ends_a_run_whose_worker_is_stuck() -> None:
    """The workers are daemons: one that never ends keeps nobody waiting for long."""
    stuck, release = threading.Event(), threading.Event()

    class Stuck(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training and threading.current_thread() is not threading.main_thread():
                stuck.set()
                release.wait(30)
            return super().forward(inputs)

    def press_twice() -> None:
        assert stuck.wait(30)
        for pause in (0.1, 1.2):
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press_twice)
    presser.start()
    task = small_task(model=lambda: Stuck(6, 3).double())
    try:
        with pytest.raises(KeyboardInterrupt):
            dure.train(task, dure.DataParallel(8), dure.Threads(2), dure.Stop(steps=5))
    finally:
        release.set()
        presser.join()


def test_the_command_line_trains_resumes_and_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", "digits", "data-parallel", "--world", "threads", "--workers", "2", "--json"]
    assert main([*train, "--steps", "3", "--out", str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["world"] == "2 threads"
    assert main(["train", "--resume", str(tmp_path / "a"), "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5
    line = command(read_run(tmp_path / "a"))
    assert line is not None
    assert "--world threads" in line
    assert main([*line.split()[1:], "--json", "--out", str(tmp_path / "b")]) == 0
    assert (
        '<span class="who">master<small>↑ '
        in write_report([tmp_path / "b"], tmp_path / "report.html").read_text()
    )
    assert (
        main(
            [
                "compare",
                "digits",
                "data-parallel,world=threads",
                "--workers",
                "2",
                "--steps",
                "2",
                "--json",
                "--out",
                str(tmp_path / "c"),
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            "train digits data-parallel --devices cpu",
            "--devices sets where threads compute: add --world threads",
        ),
        ("train digits fed-avg --world threads", "FedAvg does not run in Threads"),
        ("compare digits data-parallel,world=moon", "there is no world 'moon'"),
    ],
)
def test_lines_that_make_no_sense_are_answered(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert complaint in capsys.readouterr().err
