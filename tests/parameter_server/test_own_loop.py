"""Workers in training loops of their own: `join`, `pull`, `push`, and what becomes of the dead."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
import dure.parameter_server as ps
from dure.contracts.world import RankContext
from dure.errors import PeerLostError
from dure.parameter_server.processes import user_loop_worker
from small import CLASSES, FEATURES, network
from test_docs import DOCS, FENCE

ELEMENTS = 215
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

Batch = tuple[Tensor, Tensor]


def on_ranks(ranks: int, program: Callable[[RankContext], Any]) -> list[Any]:
    """What `program` returns on every rank; None for those that were killed."""
    with tempfile.TemporaryDirectory() as folder:

        def telling(context: RankContext) -> None:
            context.survives_peer_loss()
            try:
                told = program(context)
            except Exception as error:
                told = repr(error)
            Path(folder, str(context.group.rank)).write_bytes(pickle.dumps(told))

        dure.Processes(ranks, deadline=20).run(telling, lambda event: None)
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def model_of(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return network()


def batch(worker: int, step: int) -> Batch:
    """What a worker has for a step; workers have different numbers of examples."""
    generator = torch.Generator().manual_seed(100 * worker + step)
    examples = 3 + worker
    inputs = torch.randn(examples, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (examples,), generator=generator)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1).clone() for one in model.parameters()])


def by_hand(
    steps: Sequence[Sequence[int]],
    make: Callable[..., torch.optim.Optimizer] = SGD,
    schedule: Callable[[int], float] = lambda step: 1.0,
) -> Tensor:
    """The weights of one process after joint batches. steps: who has a part in each."""
    model = model_of()
    optimizer = make(model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    for step, workers in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate * schedule(step)
        parts = [batch(worker, step) for worker in workers]
        optimizer.zero_grad()
        inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def a_step(worker: ps.Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = batch(worker.number, worker.clock)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    worker.push(weight=len(targets))


def synchronous(context: RankContext) -> Any:
    # Other weights on each rank: rank 0's are those with which all begin.
    model = model_of(seed=1 + context.group.rank)
    optimizer = SGD(model.parameters())
    worker = ps.join(model, optimizer, servers=2, process_group=context.group)
    if worker is None:
        return weights(model)
    with worker:
        for _ in range(4):
            worker.pull()
            a_step(worker, model, optimizer)
        worker.pull()
    return weights(model), worker.staleness, worker.bytes_sent, worker.bytes_received


def test_with_staleness_0_it_is_data_parallel_to_the_last_digits() -> None:
    leader, _, _, *workers = on_ranks(5, synchronous)
    expected = by_hand([(0, 1)] * 4)
    assert (leader - expected).abs().max() < 1e-12
    for found, staleness, sent, received in workers:
        assert torch.equal(found, leader)
        assert staleness == {0: 5}
        # The weights go up in each step, and down in each pull.
        assert (sent, received) == (4 * 8 * ELEMENTS, 5 * 8 * ELEMENTS)


def halved(step: int) -> float:
    """A schedule of learning rates."""
    return float(0.5**step)


def alone(context: RankContext) -> Any:
    model = model_of()
    model.register_buffer("seen", torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    worker = ps.join(
        model,
        optimizer,
        servers=2,
        staleness=None,
        lr_schedule=halved,
        process_group=context.group,
    )
    if worker is None:
        return weights(model), model.seen, []
    wrong = []

    def refused(call: Callable[[], None]) -> None:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call()
        wrong.append(str(raised.value))

    with worker:
        refused(worker.push)
        for step in range(5):
            worker.pull()
            if step == 3:
                optimizer.zero_grad()
                refused(worker.push)
                model(batch(0, 0)[0] * torch.inf).sum().backward()
                refused(worker.push)
                refused(partial(worker.push, weight=-1.0))
            inputs, targets = batch(0, step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            worker.push()
        model.seen += 2j
    refused(worker.pull)
    return worker.clock, None, wrong


def test_one_worker_has_the_bits_of_its_loop_without_servers_and_wrong_calls_change_nothing() -> (
    None
):
    (found, seen, _), _, _, (clock, _, wrong) = on_ranks(4, alone)
    assert torch.equal(found, by_hand([(0,)] * 5, partial(torch.optim.Adam, lr=0.01), halved))
    # The statistics of the model are the worker's.
    assert torch.equal(seen, torch.full((2,), 2j))
    assert clock == 5
    texts = [
        r"push\(\) needs a pull\(\)",
        "0.weight has no gradient",
        "gradient of 0.weight is not finite at step 4 of worker 0",
        r"weight is -1.0",
        r"pull\(\) was called too late for worker 0: it has left",
    ]
    assert len(wrong) == len(texts)
    for text, said in zip(texts, wrong, strict=True):
        assert re.search(text, said), said


def with_deaths(context: RankContext) -> Any:
    """Worker 2 is killed before its fourth push, server 0 later; worker 1 leaves after four."""
    pids = [int(pid) for (pid,) in context.group.all_gather_values([float(os.getpid())])]
    model = model_of()
    optimizer = SGD(model.parameters())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        worker = ps.join(model, optimizer, servers=2, replicas=1, process_group=context.group)
    if worker is None:
        return weights(model), [str(one.message) for one in told]
    with worker:
        for step in range(4 if worker.number == 1 else 8):
            worker.pull()
            if worker.number == 2 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if worker.number == 0 and step == 6:
                os.kill(pids[1], signal.SIGKILL)
            a_step(worker, model, optimizer)
        worker.pull()
    return weights(model)


def test_the_others_go_on_when_one_is_killed_or_leaves_and_when_a_server_with_a_copy_dies() -> None:
    found = on_ranks(6, with_deaths)
    leader, told = found[0]
    # The dead worker's pushes count, and nobody makes up for the others.
    expected = by_hand([(0, 1, 2)] * 3 + [(0, 1)] + [(0,)] * 4)
    assert (leader - expected).abs().max() < 1e-12
    assert torch.equal(leader, found[3])
    assert len(told) == 2
    assert "worker 2, rank 5, is lost" in told[0]
    assert "server 0, rank 1, is lost" in told[1]


def with_an_error(context: RankContext) -> Any:
    model = model_of()
    optimizer = SGD(model.parameters())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        worker = ps.join(model, optimizer, staleness=1, process_group=context.group)
    if worker is None:
        return [str(one.message) for one in told]
    try:
        with worker:
            for step in range(5):
                worker.pull()
                if worker.number == 1 and step == 2:
                    raise LookupError("a file is not there")
                a_step(worker, model, optimizer)
    except LookupError:
        return "failed"
    return max(worker.staleness)


def test_the_others_go_on_when_a_loop_ends_with_an_error() -> None:
    told, _, ahead, failed = on_ranks(4, with_an_error)
    assert told == [
        "worker 1, rank 3, is lost (LookupError: a file is not there); "
        "the others continue without it"
    ]
    assert ahead <= 1
    assert failed == "failed"


def waiting(folder: Path, context: RankContext) -> Any:
    model = model_of()
    optimizer = SGD(model.parameters())
    try:
        worker = ps.join(model, optimizer, staleness=1, process_group=context.group, deadline=2.0)
        assert worker is not None
        with worker:
            while True:
                worker.pull()
                if worker.number == 1 and worker.clock == 1:
                    # It lives, and makes no step until the other has given up.
                    while not (folder / "given up").exists():
                        time.sleep(0.05)
                a_step(worker, model, optimizer)
    except PeerLostError as error:
        (folder / "given up").touch()
        assert not [one for one in threading.enumerate() if one.name == "dure heart"]
        return error.ranks, str(error)


def test_who_waits_too_long_for_another_ends_the_run_and_names_it(tmp_path: Path) -> None:
    for ranks, text in on_ranks(4, partial(waiting, tmp_path)):
        assert ranks == (3,)
        # Two steps ahead of its one.
        assert text == "rank 3 made no step for 2 s, during the pull of worker 0 of step 4"


def without_a_leader(context: RankContext) -> Any:
    (leader,) = context.group.all_gather_values([float(os.getpid())])[0]
    model = model_of()
    optimizer = SGD(model.parameters())
    user_loop_worker.VERDICT_SECONDS = 1.0
    try:
        worker = ps.join(model, optimizer, process_group=context.group, deadline=1.0)
        assert worker is not None
        with worker:
            os.kill(int(leader), signal.SIGSTOP)
            while True:
                worker.pull()
                a_step(worker, model, optimizer)
    except PeerLostError as error:
        os.kill(int(leader), signal.SIGCONT)
        return error.ranks, str(error)


def test_a_leader_that_falls_silent_is_named() -> None:
    # The servers give nobody anything without it, since it might have put others in their place.
    ranks, text = on_ranks(3, without_a_leader)[2]
    assert ranks == (0,)
    assert re.match(r"rank 0 said nothing for \d+ s, during the pull of step \d+", text)


def without_a_copy(context: RankContext) -> Any:
    pids = [int(pid) for (pid,) in context.group.all_gather_values([float(os.getpid())])]
    model = model_of()
    optimizer = SGD(model.parameters())
    try:
        worker = ps.join(model, optimizer, servers=2, process_group=context.group)
        assert worker is not None
        worker.pull()
        os.kill(pids[2], signal.SIGKILL)
        while True:
            a_step(worker, model, optimizer)
            worker.pull()
    except PeerLostError as error:
        return str(error)


def test_a_server_that_dies_without_a_copy_ends_the_run_and_is_named() -> None:
    leader, other, _, worker = on_ranks(4, without_a_copy)
    assert leader == other == worker
    assert "rank 2 " in leader
    assert "server 1 held the float64 keys 108 to 214, of which there is no copy" in leader
    assert "replicas=1 keeps one" in leader


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = SGD(model.parameters())
    model(batch(0, 0)[0]).sum().backward()
    optimizer.step()
    return optimizer


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = SGD(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def refusals(context: RankContext) -> list[str]:
    rank = context.group.rank
    found = []

    def refused(
        model: nn.Module,
        make: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: SGD(model.parameters()),
        **settings: Any,
    ) -> None:
        with pytest.raises(ValueError, match=r"\w+") as raised:
            ps.join(model, make(model), process_group=context.group, **settings)
        found.append(str(raised.value))

    refused(model_of(), servers=2)
    refused(model_of(), replicas=1)
    refused(model_of(), staleness=-1)
    refused(model_of(), lambda model: torch.optim.LBFGS(model.parameters()))
    refused(model_of(), stepped)
    refused(model_of(), scheduled)
    refused(model_of(), lambda model: SGD(model_of().parameters()))
    refused(nn.Linear(2, 2, device="meta"))
    refused(nn.Embedding(5, 2, sparse=True))
    refused(nn.LazyLinear(2))
    refused(nn.Linear(2, 2 + rank))
    refused(model_of(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1 + rank))
    # What one rank refuses, all refuse.
    refused(model_of() if rank < 2 else nn.Linear(2, 2, device="meta"))
    return found


def test_what_servers_cannot_have_every_rank_refuses_before_anything_begins() -> None:
    texts = [
        "servers=2 and a worker need 4 ranks including the leader, but here are 3",
        "a copy of a shard needs a second server",
        "staleness is -1",
        "whether LBFGS updates every element independently",
        "SGD has made steps",
        "a torch scheduler changes the learning rates of SGD here",
        "SGD has a parameter that does not belong to the model",
        "the model is on meta",
        "weight is a sparse embedding",
        "weight has no shape yet",
        "rank 1, 2 has different parameters or buffers than rank 0",
        "rank 1, 2 has other settings, or another optimizer, than rank 0",
        "the model is on meta",
    ]
    for said in on_ranks(3, refusals):
        assert len(said) == len(texts)
        for text, one in zip(texts, said, strict=True):
            assert text in one


def test_without_a_job_of_ranks_it_says_what_is_missing() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="here is 1: start more, such as by torchrun"):
        ps.join(model, SGD(model.parameters()))


def test_the_loop_of_the_page_runs_under_torchrun(tmp_path: Path) -> None:
    page = (DOCS / "parameter-server.md").read_text()
    (script,) = (body for _, body in FENCE.findall(page) if body.startswith("# my_loop.py\n"))
    (tmp_path / "my_loop.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert "torchrun --nproc-per-node 4 my_loop.py" in page
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "4", "my_loop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"accuracy (\S+)", done.stdout)
    # Nothing in it is seeded, and who is first is luck: far from the tenth of a guess is enough.
    assert float(accuracy) > 0.5
    assert (tmp_path / "model.pt").is_file()
