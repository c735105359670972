"""The worlds and engines in which a fault is tried, and how each of them is run.

Each of them is a function that trains the faulty task, and says what became of it for whoever
watches: of one process, or of several that are started here (torchrun's ranks, a server and its
clients).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from faulty_task import IN_THIS_PROCESS, Fault, struck, task_of

import dure
from dure.run.join import join

JSON = dict[str, Any]
PLACES = ("loss", "forward:1", "backward:1", "data", "metric", "optimizer")
STAGES = tuple(f"{way}:{block}" for block in (0, 1, 2) for way in ("forward", "backward"))
ROUNDS = 6
STEPS = 32


@dataclass(frozen=True)
class Case:
    """A fault in a world. folder: for what is written on the way."""

    fault: Fault
    folder: Path
    deadline: float


Way = Callable[[Case], JSON]


@dataclass(frozen=True)
class Where:
    """A world with an engine or a system.

    places: of faults there. lasting: runs follow each other in one process, which so keeps its fork
    server. ranks: how many take turns in striking; 0 leaves it to whoever comes first. goes_on:
    whether the run may go on without the one that struck. waits: how many deadlines may pass one
    after the other.
    """

    way: Way
    places: tuple[str, ...] = PLACES
    lasting: bool = False
    ranks: int = 0
    goes_on: bool = False
    waits: float = 1.0


def outcome(train: Callable[[], Any]) -> JSON:
    """What became of it: {"ended": why}, or {"error": its class, "text": what it says}."""
    try:
        return {"ended": train()}
    except BaseException as error:
        if os.environ.get("FAULTS_DEBUG"):
            traceback.print_exc()
        return {"error": type(error).__name__, "text": str(error)}


def _trained(case: Case, strategy: Any, world: Any, steps: int, **options: bool) -> JSON:
    rounds = strategy.traits.unit == "round"
    stop = dure.Stop(rounds=steps) if rounds else dure.Stop(steps=steps)
    every = 1 if rounds else steps // 4

    def train() -> str:
        run = dure.train(
            task_of(case.fault, **options),
            strategy,
            world,
            stop,
            evaluate_every=every,
            out=case.folder / "run",
            # A pipeline's proof refuses a model that counts its passes.
            check=not case.fault.place.startswith("forward"),
        )
        return str(run.summary["ended"])

    return outcome(train)


# One process, and ranks


def ranks(strategy: Any, count: int, backend: str) -> Way:
    def way(case: Case) -> JSON:
        world = dure.Processes(count, case.deadline, backend)  # type: ignore[arg-type]
        return _trained(case, strategy, world, STEPS)

    return way


def one_process(case: Case) -> JSON:
    return _trained(case, dure.SingleWorker(batch_size=16), None, STEPS)


def threads(case: Case) -> JSON:
    return _trained(case, dure.DataParallel(batch_size=16), dure.Threads(2), STEPS)


def torchrun(backend: str) -> Way:
    """As torchrun starts ranks, but nobody ends those that are left: they have to by themselves."""

    def way(case: Case) -> JSON:
        port_file = case.folder / "port"
        store = _forked(lambda: _hold_store(port_file))
        port = _read(port_file)
        results = [case.folder / f"rank-{rank}.json" for rank in range(2)]
        for rank, result in enumerate(results):
            _forked(lambda rank=rank, result=result: _as_rank(case, rank, port, backend, result))
        said = _said_by_ranks(results, case)
        os.kill(store, signal.SIGKILL)
        return _first_error(said)

    return way


def _hold_store(port_file: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    _write(port_file, str(store.port))
    time.sleep(3600)


def _as_rank(case: Case, rank: int, port: str, backend: str, result: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    world = dure.Torchrun(case.deadline, backend)  # type: ignore[arg-type]
    said = _trained(case, dure.DataParallel(batch_size=16), world, STEPS)
    _write(result, json.dumps(said))


# Clients


def simulated(engine: str, strategy: Any = None) -> Way:
    def way(case: Case) -> JSON:
        federated = strategy or dure.FedAvg(
            clients=None, partition=dure.NaturalKey(), batch_size=8, local_epochs=1
        )
        kind = engine.partition("-")[0]
        options: JSON = {"engine": engine} if engine else {}
        if strategy is None:
            options |= {"deadline": case.deadline, "processes": 2}
        # Many clients at once have their examples as one tensor, and losses of one kind.
        if engine.endswith("ray"):
            _have_ray()
        task = {"reads": kind == "loop", "pairs": kind == "batched"}
        return _trained(case, federated, dure.Simulated(**options), ROUNDS, **task)

    return way


def _have_ray() -> None:
    """A cluster that runs already is used, and left running: it takes seconds to start."""
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")


def network(strategy: Any) -> Way:
    """A server and its clients, each a process."""

    def way(case: Case) -> JSON:
        url_file = case.folder / "url"
        served = case.folder / "server.json"
        _forked(lambda: _serve(case, strategy, url_file, served))
        url = _read(url_file)
        for client in range(2):
            _forked(lambda client=client: _join(case, url, client))
        server = json.loads(_read(served, 300))
        time.sleep(0.5)
        # What its owner reads of an error of its own; the server may well go on without it.
        told = [path.read_text() for path in sorted(case.folder.glob("*.told"))]
        return {**server, "clients": told}

    return way


def _serve(case: Case, strategy: Any, url_file: Path, result: Path) -> None:
    IN_THIS_PROCESS["name"] = "server"

    def progress(event: Mapping[str, Any]) -> None:
        if "serving" in event:
            _write(url_file, event["serving"])

    world = dure.Network(
        port=0, access="open", deadline=case.deadline, heartbeat=1, measure_seconds=case.deadline
    )

    def serve() -> str:
        run = dure.train(
            task_of(case.fault),
            strategy,
            world,
            dure.Stop(rounds=ROUNDS),
            out=case.folder / "run",
            check=not case.fault.place.startswith("forward"),
            on_progress=progress,
        )
        return str(run.summary["ended"])

    _write(result, json.dumps(outcome(serve)))


def _join(case: Case, url: str, client: int) -> None:
    told = case.folder / f"client-{client}.told"
    IN_THIS_PROCESS["name"] = f"client {client}"

    def progress(what: str, about: Mapping[str, object]) -> None:
        if what == "failed":
            _write(told, str(about["error"]))

    said = outcome(
        lambda: join(
            url,
            task_of(case.fault),
            part=client,
            name=f"site {client}",
            state=case.folder / f"site-{client}",
            on_progress=progress,
        )
    )
    if "error" in said:
        _write(told, f"client {client}: {said['text']}")


# Processes of this program's own


def _forked(program: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        _live(program)
    return pid


def _live(program: Callable[[], None]) -> NoReturn:
    try:
        torch.set_num_threads(1)
        program()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _write(path: Path, text: str) -> None:
    # At once: whoever waits for the file reads all of it.
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _read(path: Path, seconds: float = 60) -> str:
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return path.read_text()


def _json(path: Path) -> JSON | None:
    return json.loads(path.read_text()) if path.exists() else None


def _said_by_ranks(results: list[Path], case: Case) -> list[JSON | None]:
    """What ranks have said in the end, all of them but one that cannot."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        by = struck(Path(case.fault.marker))
        silent = by["rank"] if by is not None and case.fault.kind not in ("raise", "exit") else None
        if all(path.exists() for rank, path in enumerate(results) if rank != silent):
            break
        time.sleep(0.05)
    return [_json(path) for path in results]


def _first_error(said: list[JSON | None]) -> JSON:
    """What the ranks that are left say; each of them has to say it, so their texts are joined."""
    errors = [one for one in said if one is not None and "error" in one]
    if not errors:
        return next((one for one in said if one is not None), {})
    return {**errors[0], "text": " // ".join(one["text"] for one in errors)}


TWO = dure.FedAvg(clients=2, batch_size=8)
SPLIT = dure.SplitLearning(clients=2, batch_size=8)

WHERES: dict[str, Where] = {
    "one process": Where(one_process),
    "threads": Where(threads),
    "processes, dure": Where(
        ranks(dure.DataParallel(batch_size=16), 2, "dure"), lasting=True, ranks=2
    ),
    "processes, gloo": Where(
        ranks(dure.DataParallel(batch_size=16), 2, "gloo"), lasting=True, ranks=2
    ),
    "pipeline, dure": Where(
        ranks(dure.Pipeline(batch_size=16), 3, "dure"),
        places=("loss", *STAGES, "data", "metric", "optimizer"),
        lasting=True,
    ),
    "pipeline, gloo": Where(
        ranks(dure.Pipeline(batch_size=16), 3, "gloo"),
        places=("loss", *STAGES, "data", "metric", "optimizer"),
        lasting=True,
    ),
    "ZeRO 3": Where(ranks(dure.ZeRO(batch_size=16, stage=3), 2, "dure"), lasting=True, ranks=2),
    "local SGD": Where(
        ranks(dure.LocalSGD(batch_size=16, period=2), 2, "dure"), lasting=True, ranks=2
    ),
    "parameter server": Where(
        ranks(dure.ParameterServer(servers=2, workers=2, batch_size=16, period=2), 5, "dure"),
        lasting=True,
        goes_on=True,
        waits=3,
    ),
    "Downpour": Where(
        ranks(
            dure.Downpour(replicas=2, partitions=1, servers=1, batch_size=8, period=2), 4, "dure"
        ),
        lasting=True,
        goes_on=True,
        waits=3,
    ),
    "torchrun, dure": Where(torchrun("dure"), ranks=2),
    "torchrun, gloo": Where(torchrun("gloo"), ranks=2),
    "loop": Where(simulated("loop")),
    "batched": Where(simulated("batched")),
    "loop-processes": Where(simulated("loop-processes")),
    "batched-processes": Where(simulated("batched-processes")),
    "loop-ray": Where(simulated("loop-ray"), lasting=True),
    "batched-ray": Where(simulated("batched-ray"), lasting=True),
    "split, simulated": Where(simulated("", SPLIT)),
    "network": Where(network(TWO), goes_on=True, waits=ROUNDS),
    "split, network": Where(network(SPLIT), goes_on=True, waits=ROUNDS),
}
