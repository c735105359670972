"""torchrun's agents lose workers and each other by SIGKILL; the run goes on, and every example
counts once an epoch."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

import dure
from dure.cli.main import main
from dure.contracts.strategy import Strategy
from dure.contracts.world import RankContext
from dure.errors import RunFolderError
from dure.record.run import RunFolder
from dure.run.drive import drive
from dure.run.job import Job
from dure.run.train import prepare
from process_tree import end_family
from small import largest_difference, same_bits, small_task

TASK_FILE = '''
import os, signal, time
from pathlib import Path
import torch
from torch import nn
import dure

EXAMPLES, BATCH = 40, 8
HERE = Path(__file__).parent
RANK = int(os.environ.get("RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "0"))
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

class Net(nn.Module):
    """A network, and a weight for each example, which grows by one whenever a batch holds it."""

    def __init__(self):
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(EXAMPLES, dtype=torch.float64))
        self.first = nn.Parameter(torch.randn(4, 8, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(8, 3, dtype=torch.float64))
        self.steps = 0

    def forward(self, inputs):
        if not self.training:
            # To count its operations takes an import of a second.
            raise RuntimeError("nobody evaluates this, nor counts its operations")
        if "RANK" in os.environ:
            self.steps += 1
            happens(self.steps)
        return (inputs[:, 1:] @ self.first).tanh() @ self.second, self.uses[inputs[:, 0].long()]

def happens(step):
    if step == 1:
        with open(HERE / "lives", "a") as lives:
            lives.write(f"{os.getpid()} {RANK} {SIZE}\\n")
    who, rank = os.environ["KILLED"].split()
    if who == "worker" and LIFE == 0 and RANK == int(rank) and step == 18:
        os.kill(os.getpid(), signal.SIGKILL)
    if who == "agent" and SIZE == 1 and LIFE == 0:
        time.sleep(0.05)
    if who == "agent" and SIZE == 2 and RANK == int(rank) and step == 18:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

def loss(outputs, targets):
    logits, uses = outputs
    return nn.functional.cross_entropy(logits, targets) - uses.mean()

class Momentum:
    """SGD with momentum on the network, and without on the uses.

    torch's own take a second to import.
    """

    def __init__(self, parameters):
        self.uses, *self.body = parameters
        self.buffers = [torch.zeros_like(weight) for weight in self.body]

    def zero_grad(self, set_to_none):
        for weight in (self.uses, *self.body):
            weight.grad = None

    @torch.no_grad()
    def step(self):
        self.uses -= BATCH * self.uses.grad
        for weight, buffer in zip(self.body, self.buffers):
            buffer.mul_(0.9).add_(weight.grad)
            weight -= 0.1 * buffer

    def state_dict(self):
        return {"buffers": self.buffers}

    def load_state_dict(self, state):
        self.buffers = list(state["buffers"])

def task() -> dure.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)
    numbered = torch.cat([torch.arange(EXAMPLES).double()[:, None], inputs], dim=1)
    data = numbered, inputs[:, :3].argmax(dim=1)
    return dure.Task(model=Net, loss=loss, train=data, optimizer=Momentum)
'''

LAUNCHER = """
import sys, time
from pathlib import Path
from torch.distributed.run import main

while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
main(sys.argv[2:])
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "counting.py"
    path.write_text(TASK_FILE)
    return path


@contextmanager
def agent(
    task_file: Path, epochs: int, killed: str, flags: list[str], begins_with: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with the command, once the file `begins_with` is there; at the end of the block all
    of it is gone."""
    here = task_file.parent
    asked = [
        "--batch-size",
        "8",
        "--epochs",
        str(epochs),
        "--checkpoint-every",
        "7",
        "--deadline",
        "20",
    ]
    command = [
        sys.executable,
        "-c",
        LAUNCHER,
        str(here / begins_with),
        *flags,
        "--max-restarts",
        "2",
        "-m",
    ]
    command += [
        "dure",
        "train",
        f"{task_file}:task",
        "data-parallel",
        *asked,
        "--out",
        str(here / "run"),
    ]
    with open(here / "said", "ab") as said:
        surroundings = {**os.environ, "KILLED": killed, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=said, stderr=said, env=surroundings)
    try:
        yield process
    finally:
        end_family(process)


def lives(folder: Path) -> list[tuple[int, int, int]]:
    """(process, rank, world size) of every rank that has trained, in the order of their first
    steps."""
    path = folder / "lives"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]


def check(task_file: Path, epochs: int) -> None:
    """The run is the one that nothing disturbed."""
    out, task = task_file.with_name("run"), dure.load_task(f"{task_file}:task")
    whole = dure.train(task, dure.SingleWorker(batch_size=8), stop=dure.Stop(epochs=epochs))
    broken = dure.load_run(out, task.model)
    assert broken.model.state_dict()["uses"].tolist() == [epochs] * 40, (
        "every example once an epoch"
    )
    assert largest_difference(whole, broken) < 1e-10
    mine, expected = RunFolder(out).history().steps, whole.history.steps
    assert [(s.step, s.samples) for s in mine] == [(s.step, s.samples) for s in expected]
    assert [s.loss for s in mine] == pytest.approx([s.loss for s in expected], abs=1e-10)
    left = [pid for pid, _, _ in lives(task_file.parent) if Path(f"/proc/{pid}").exists()]
    assert left == [], "no rank outlives the job"


def test_a_killed_worker_is_started_again_and_the_run_goes_on(
    task_file: Path, tmp_path: Path
) -> None:
    with agent(task_file, 6, "worker 1", ["--standalone", "--nproc-per-node", "2"]) as process:
        assert process.wait(timeout=100) == 0, (tmp_path / "said").read_text()
    assert sorted((rank, size) for _, rank, size in lives(tmp_path)) == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]
    check(task_file, 6)


def test_a_machine_joins_and_the_one_with_rank_0_is_killed(
    task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without it torch 2.13 hangs when a machine joins.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store = TCPStore(
        "127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    conf = (
        "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5,"
        "last_call_timeout=1,join_timeout=60"
    )
    flags = [
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{store.port}",
    ]
    flags += ["--rdzv-id", "elastic", "--rdzv-conf", conf, "--local-addr", "127.0.0.1"]
    with (
        agent(task_file, 100, "agent 0", flags) as first,
        agent(task_file, 100, "agent 0", flags, begins_with="lives") as second,
    ):
        assert first.wait(timeout=100) == -signal.SIGKILL, (tmp_path / "said").read_text()
        assert second.wait(timeout=100) == 0, (tmp_path / "said").read_text()
    assert [size for _, _, size in lives(tmp_path)] == [1, 2, 2, 1], (tmp_path / "said").read_text()
    check(task_file, 100)


def begun(out: Path, strategy: Strategy, ranks: int) -> None:
    """Begins a run with two ranks, and writes into its folder that it has `ranks`."""
    dure.train(small_task(), strategy, dure.Processes(2), dure.Stop(epochs=2), out=out)
    config = RunFolder(out).read_json("config.json")
    config["world"]["ranks"] = ranks
    RunFolder(out).write_json("config.json", config)


LIKE_ONE_WORKER = [
    dure.DataParallel(batch_size=8),
    dure.LocalSGD(batch_size=8, period=1),
    dure.DiLoCo(batch_size=8, period=1, outer_lr=1.0, outer_momentum=0.0),
    dure.ZeRO(batch_size=8, stage=3),
]


@pytest.mark.parametrize(
    ("strategy", "ranks"), [(LIKE_ONE_WORKER[0], 1), *((one, 3) for one in LIKE_ONE_WORKER)]
)
def test_a_run_goes_on_with_fewer_ranks_or_more(
    strategy: Strategy, ranks: int, tmp_path: Path
) -> None:
    begun(tmp_path / "run", strategy, ranks)
    changed = dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(epochs=4))
    whole = dure.train(small_task(), dure.SingleWorker(batch_size=8), stop=dure.Stop(epochs=4))
    assert largest_difference(changed, whole) < 1e-10
    two, four = (changed.history.evaluations[i] for i in (2, 4))
    assert (
        four.bytes_sent > two.bytes_sent > 0 if ranks > 1 else four.bytes_sent == two.bytes_sent > 0
    )
    assert changed.summary["bytes_sent"] == four.bytes_sent, (
        "what ranks that are gone have sent still counts"
    )


def test_ranks_with_a_state_of_their_own_are_not_divided_anew(tmp_path: Path) -> None:
    begun(tmp_path / "run", dure.ADMM(batch_size=8), 3)
    with pytest.raises(
        RunFolderError, match="was written by 2 ranks, and admm cannot be resumed with 3"
    ):
        dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(epochs=4))


def test_the_command_of_a_run_that_has_ended_trains_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore(
        "127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    job = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for name, value in {**job, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)

    def command(seed: int = 0, elastic: bool = True) -> dure.Run:
        world, stop = dure.Torchrun(elastic=elastic), dure.Stop(epochs=1)
        return dure.train(
            small_task(), dure.DataParallel(8), world, stop, seed=seed, out=tmp_path / "run"
        )

    first, second = command(), command()
    assert torch.get_num_threads() == 1, "what it was before"
    assert same_bits(first, second)
    assert [s.step for s in second.history.steps] == [s.step for s in first.history.steps]
    with pytest.raises(RunFolderError, match="contains another run, which differs in seed"):
        command(seed=1)
    with pytest.raises(RunFolderError, match="is not empty"):
        command(elastic=False)


def ended_on_every_rank(context: RankContext, job: Job) -> list[float]:
    """Whether each rank knows that rank 0 was interrupted, and evaluated no more."""
    outcome = drive(job, dataclasses.replace(context, interrupted=lambda: True))
    steps, evaluations = len(outcome.history.steps), len(outcome.history.evaluations)
    told = (outcome.summary["ended"] == "interrupt") and (steps, evaluations) == (1, 1)
    return [value for (value,) in context.group.all_gather_values([float(told)])]


def test_every_rank_of_an_elastic_job_knows_that_it_makes_way(tmp_path: Path) -> None:
    world = dure.Processes(2)
    job, config = prepare(
        small_task(), dure.DataParallel(batch_size=8), world, dure.Stop(epochs=5), seed=0
    )
    RunFolder.create(tmp_path / "run", config)
    job = dataclasses.replace(job, folder=tmp_path / "run", elastic=True)
    assert world.run(functools.partial(ended_on_every_rank, job=job), print) == [1.0, 1.0]
    assert (tmp_path / "run" / "checkpoint" / "00000001").is_dir()


@pytest.mark.parametrize(("elastic", "saved"), [(True, [1, 2, 3, 4]), (False, [4])])
def test_an_elastic_job_does_not_wait_for_an_evaluation_to_save(
    elastic: bool, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr("dure.run.checkpoints.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("dure.run.checkpoints.CHECKPOINT_SHARE", float("inf"))
    monkeypatch.setattr(
        RunFolder, "save_checkpoint", lambda folder, step, parts, past: steps.append(step)
    )
    world = dure.Processes(1)
    job, config = prepare(
        small_task(), dure.SingleWorker(8), world, dure.Stop(steps=4), seed=0, evaluate_every=100
    )
    RunFolder.create(tmp_path / "run", config)
    job = dataclasses.replace(job, folder=tmp_path / "run", elastic=elastic)
    world.run(functools.partial(drive, job), print)
    assert steps == saved


def does_not_see_it(context: RankContext, job: Job) -> None:
    drive(
        job if context.group.rank == 0 else dataclasses.replace(job, folder=Path("elsewhere")),
        context,
    )


def test_a_folder_that_not_all_machines_see_is_refused(tmp_path: Path) -> None:
    world = dure.Processes(2)
    job, config = prepare(
        small_task(), dure.DataParallel(batch_size=8), world, dure.Stop(epochs=5), seed=0
    )
    RunFolder.create(tmp_path / "run", config)
    job = dataclasses.replace(job, folder=tmp_path / "run", elastic=True)
    with pytest.raises(RunFolderError, match="rank 1 cannot read the run folder"):
        world.run(functools.partial(does_not_see_it, job=job), print)


def test_a_job_that_torchrun_may_start_again_is_elastic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert not dure.Torchrun().elastic
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert dure.Torchrun().elastic
    assert not dure.Torchrun(elastic=False).elastic
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", "data-parallel"]) == 2, (
        "without --out a restarted rank would not find the run"
    )
    assert list(tmp_path.iterdir()) == []
