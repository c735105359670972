"""Federations of real processes, for tests: a server, clients, and what lies between them.

Processes are forked from one that has imported everything, so that each is there at once. The
clients' way to the server is a proxy of the test's own (`proxy.py`): it has the same address
whatever becomes of the server behind it. Every wait has a deadline, and every process an end.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from proxy import Proxy

import dure
from dure.deploy.world import Network
from dure.run.join import join
from dure.wire.certificates import issue_server, make_authority
from small import small_task

SECONDS = 60.0
"""That anything here may take, on a busy machine."""

_SERVER = ["dure.deploy.server.app", "dure.deploy.server.serving"]
_CLIENT = ["dure.deploy.client.loop", "dure.deploy.client.policy"]
_SPLIT = ["dure.split.network.served", "dure.deploy.client.split_site"]
_TRACING = ["torch._dynamo", "torch.export._trace", "torch.fx.experimental.symbolic_shapes"]
_context = multiprocessing.get_context("forkserver")


def _load(modules: list[str]) -> None:
    """Processes that are started from here on have these as well."""
    # Another one begins with the next process.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    # Modules of the tests are not on its path.
    _context.set_forkserver_preload(
        ["pytest", "torch", "dure.run.train", "dure.run.join", *_SERVER, *_CLIENT, *modules]
    )


_load([])
atexit.register(forkserver._forkserver._stop)  # type: ignore[attr-defined]


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Inside, processes have what traces a model that is cut: seconds in each that loads it."""
    _load([*_SPLIT, *_TRACING])
    yield
    _load([])


Tasks = Callable[[], dure.Task]


@dataclass(frozen=True)
class Plan:
    """What is served. options: of `Network`. Clients have the task of the server by default."""

    strategy: dure.Strategy
    rounds: int = 4
    task: Tasks = small_task
    seed: int = 0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stop(self) -> dure.Stop:
        return dure.Stop(rounds=self.rounds)

    def simulated(self) -> Ended:
        """The same run where clients are simulated: what it has to come to."""
        torch.set_num_threads(1)
        run = dure.train(
            self.task(),
            self.strategy,
            dure.Simulated(engine="loop"),
            self.stop,
            seed=self.seed,
            evaluate_every=self.evaluate_every,
        )
        return Ended.of(run)


class Process:
    """A process of the test's, and what it says."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.heard: list[tuple[str, Any]] = []
        self._news = threading.Condition()
        mine, its = _context.Pipe(duplex=False)
        self.process = _context.Process(target=_run, args=(target, its, *arguments))
        self.process.start()
        its.close()
        self._ear = threading.Thread(target=self._listen, args=(mine,), daemon=True)
        self._ear.start()

    def _listen(self, mine: Connection) -> None:
        with mine:
            while True:
                try:
                    said = mine.recv()
                except (EOFError, OSError):
                    said = ("gone", None)
                with self._news:
                    self.heard.append(said)
                    self._news.notify_all()
                if said[0] == "gone":
                    return

    def said(self, what: str) -> list[Any]:
        """Everything of this kind that it has said."""
        with self._news:
            return [about for kind, about in self.heard if kind == what]

    def wait_for(
        self, what: str, fits: Callable[[Any], bool] = lambda about: True, seconds: float = SECONDS
    ) -> Any:
        """What it says of this kind that fits; fails where it ends or is silent for too long."""
        until = time.monotonic() + seconds
        with self._news:
            while True:
                for kind, about in self.heard:
                    if kind == what and fits(about):
                        return about
                ended = self.heard and self.heard[-1][0] == "gone"
                left = until - time.monotonic()
                assert not ended, f"it ended without {what!r}: {self.told()}"
                assert left > 0, f"no {what!r} within {seconds} s: {self.told()}"
                self._news.wait(left)

    def told(self) -> list[tuple[str, Any]]:
        """The last of what it said, without its attempts to reach a server."""
        return [one for one in self.heard if one[0] != "waiting"][-12:]

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        """At once, wherever it is."""
        if self.process.is_alive():
            # It may end by itself in between.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.join(10)
        self._ear.join(10)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run(target: Callable[..., None], talk: Connection, *arguments: Any) -> None:
    torch.set_num_threads(1)
    lock = threading.Lock()

    def tell(what: str, about: Any = None) -> None:
        # Whoever has stopped listening has ended the test.
        with lock:
            try:
                talk.send((what, about))
            except OSError:
                os._exit(1)

    try:
        target(tell, *arguments)
    except BaseException as error:
        tell("error", (type(error).__name__, str(error), traceback.format_exc()))
    finally:
        talk.close()


def _serve(
    tell: Callable[..., None], plan: Plan, network: Network, folder: Path, before: Callable[[], Any]
) -> None:
    before()

    def progress(event: Mapping[str, Any]) -> None:
        tell("progress", {key: value for key, value in event.items() if _plain(value)})
        if "serving" in event:
            tell("serving", event["serving"])

    if (folder / "config.json").exists():
        run = dure.resume(folder, task=plan.task(), on_progress=progress)
    else:
        run = dure.train(
            plan.task(),
            plan.strategy,
            network,
            plan.stop,
            seed=plan.seed,
            out=folder,
            evaluate_every=plan.evaluate_every,
            checkpoint_every=plan.checkpoint_every,
            on_progress=progress,
        )
    tell("ended", Ended.of(run))


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _join(
    tell: Callable[..., None],
    url: str,
    task: Tasks,
    settings: Mapping[str, Any],
    before: Callable[[], Any],
) -> None:
    before()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())

    def progress(what: str, about: Mapping[str, Any]) -> None:
        tell(what, dict(about))

    reason = join(url, task(), stop=stop, on_progress=progress, **settings)
    tell("compiler", "torch._dynamo" in sys.modules)
    tell("over", reason)


@dataclass(frozen=True)
class Ended:
    """What a served run has come to, as far as it can be sent."""

    weights: bytes
    losses: list[float | None]
    metrics: list[dict[str, float]]
    summary: dict[str, Any]

    @classmethod
    def of(cls, run: dure.Run) -> Ended:
        content = io.BytesIO()
        # Those that others have are shapes alone here.
        state = run.model.state_dict()
        torch.save({name: one for name, one in state.items() if not one.is_meta}, content)
        return cls(
            weights=content.getvalue(),
            losses=[step.loss for step in run.history.steps],
            metrics=[dict(one.metrics) for one in run.history.evaluations],
            summary=run.summary,
        )

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.summary["facts"][0]
        return facts

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and buffers, by name."""
        tensors: dict[str, torch.Tensor] = torch.load(io.BytesIO(self.weights))
        return tensors

    def check_same(self, other: Ended, own: str = "\0") -> None:
        """Weights, buffers, losses and metrics are those of another, to the bit.

        Not bytes: a stream of tensors has a header, which the simulation does not count.

        own: the front of the names of what belongs to each client, of which a server that has never
        seen it cannot have the mean.
        """
        mine, others = self.tensors, other.tensors
        assert mine.keys() == others.keys()
        different = [name for name in mine if not torch.equal(mine[name], others[name])]
        assert all(name.startswith(own) for name in different), different
        assert repr(self.losses) == repr(other.losses)
        # Of the model with that mean.
        means = ("test_", "client_") if different else ()
        for one, another in zip(self.metrics, other.metrics, strict=True):
            assert one.keys() == another.keys()
            for metric in (name for name in one if not name.startswith(means)):
                assert repr(one[metric]) == repr(another[metric]), metric
        for count in ("steps", "samples"):
            assert self.summary[count] == other.summary[count], count


class Deployment:
    """A server, its clients and the way between them, in `folder`; all of it ends with the block.

    tls: with certificates of an authority of its own.
    """

    def __init__(self, folder: Path, plan: Plan, tls: bool = True) -> None:
        self.folder, self.plan, self.tls = folder, plan, tls
        self.run = folder / "run"
        self.proxy = Proxy()
        self.servers: list[Process] = []
        self.clients: dict[int, Process] = {}
        self._all: list[Process] = []
        options: dict[str, Any] = {"port": 0, "access": "open", **plan.options}
        self.authority: Path | None = None
        if tls:
            certificates = folder / "certificates"
            self.authority = make_authority(certificates).certificate
            options["certificate"] = str(issue_server(certificates).certificate)
        self.network = Network(**options)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._all:
            process.kill()
        self.proxy.close()

    @property
    def url(self) -> str:
        """Where clients find the server, whichever it is."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.proxy.port}"

    @property
    def server(self) -> Process:
        return self.servers[-1]

    def serve(self, before: Callable[[], Any] = int, wait: bool = True) -> Process:
        """Begins to serve, or goes on with the run. before: is called in the process first."""
        server = Process(_serve, self.plan, self.network, self.run, before)
        self.servers.append(server)
        self._all.append(server)
        if wait:
            self.connect()
        return server

    def connect(self) -> None:
        """Leads the proxy to the newest server."""
        url = self.server.wait_for("serving")
        self.proxy.lead_to(int(url.rpartition(":")[2]))

    def restart(self) -> Process:
        """Kills the server and begins another."""
        self.proxy.lead_to(None)
        self.server.kill()
        return self.serve()

    def join(
        self,
        number: int,
        task: Tasks | None = None,
        state: bool = True,
        before: Callable[[], Any] = int,
        **settings: Any,
    ) -> Process:
        """Begins client `number`, or goes on with it: it takes the place of the simulated one.

        before: is called in the process first.
        """
        settings = {"part": number, "name": f"site {number}", **settings}
        if state:
            settings.setdefault("state", self.folder / f"site-{number}")
        settings.setdefault("authority", self.authority)
        client = Process(_join, self.url, task or self.plan.task, settings, before)
        self.clients[number] = client
        self._all.append(client)
        return client

    def join_all(self, count: int, **settings: Any) -> None:
        for number in range(count):
            self.join(number, **settings)

    def ended(self, seconds: float = SECONDS) -> Ended:
        """What the run has come to."""
        found: Ended = self.server.wait_for("ended", seconds=seconds)
        return found


def deployed(
    folder: Path, plan: Plan, clients: int, traces: bool = False, **settings: Any
) -> Ended:
    """A run of which nothing is disturbed; every client has heard that it is over.

    traces: clients trace the model, for which they load the compiler.
    """
    with Deployment(folder, plan) as deployment:
        deployment.serve()
        deployment.join_all(clients, **settings)
        ended = deployment.ended()
        for client in deployment.clients.values():
            assert client.wait_for("over") == "the run is over"
            assert client.said("compiler") == [traces], "it takes seconds to load"
        return ended
