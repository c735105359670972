"""A network of clients: this process serves, they come to it.

The server half runs here, driven by the same loop as every run; its carrier takes what clients say
from the journal in the run folder. Where the run ends, clients are told so.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from dure.contracts.strategy import Kind, Place, World
from dure.errors import ServeError, warn
from dure.fleet.budget import Budget
from dure.fleet.conditions import Conditions, EngineName
from dure.protocol.carrier import Carrier
from dure.wire.layout import Federation
from dure.wire.requests import Machine
from dure.worlds.here import refuse_under_torchrun, run_here

if TYPE_CHECKING:
    from dure.worlds.network.server.access import Access

Value = TypeVar("Value")

Mode = Literal["invited", "open"]

ENGINE: EngineName = "loop"
"""How clients on a network train: one client, step by step."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses at which only this machine is reached."""

RELOAD_SECONDS = 5.0
"""Seconds between two looks at the files of the certificate."""

SIGNING_KEY = "signing.key"
"""In a run folder: the private key by which the server signs its models."""

FAREWELL = 3.0
"""Seconds in which clients may hear that the run is over."""

LAST = 60.0
"""Seconds in which those who have heard it may fetch the last model."""


@dataclass(frozen=True)
class Network(World):
    """Clients on a network, which reach this server by HTTPS.

    Args:
        host: the address at which the server listens; other machines reach 0.0.0.0.
        port: 0 takes any that is free.
        certificate: PEM file of the server's certificate (dure certificates makes one).
        key: PEM file of its private key; by default beside the certificate.
        client_ca: PEM file of the authority that signs clients' certificates, where they need one.
        insecure: without TLS also where other machines can listen.
        access: who may take part: those invited, or whoever comes.
        start_with: clients that have to be there before the first round; all of them by default.
        deadline: seconds that a round may take, where its selection names none.
        heartbeat: seconds after which a silent connection is taken for lost.
        measure_seconds: that clients may take to measure a model on their own data.
        record: keep everything that came in, so that the run can be replayed.
        log: a file for JSON lines of what happens, - for standard error; it may be moved away at
            any time, and goes on in a new one.
        status_port: where /status, /metrics and /health are; 0 takes any that is free, and by
            default there is no such listener. The token for it is kept in RUN/status.token.
        status_host: the address of that listener.
        transfer_budget: bytes that a client may receive and send in the run, such as 100MB.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    insecure: bool = False
    access: Mode = "invited"
    start_with: int | None = None
    deadline: float = 600.0
    heartbeat: float = 10.0
    measure_seconds: float = 60.0
    record: bool = False
    log: str | None = None
    status_port: int | None = None
    status_host: str = "127.0.0.1"
    transfer_budget: int | str | None = None

    name: ClassVar[str] = "network"
    kind: ClassVar[Kind] = "clients"

    def __post_init__(self) -> None:
        refuse_under_torchrun("a server")
        # Raises ValueError for a budget that is none.
        _ = self.conditions
        # A run that goes on may be started in another folder.
        for name in ("certificate", "key", "client_ca", "log"):
            value = getattr(self, name)
            if value is not None and value != "-":
                object.__setattr__(self, name, str(Path(value).expanduser().resolve()))
        unsafe = self.status_host not in LOOPBACK and self.certificate is None
        if self.status_port is not None and unsafe and not self.insecure:
            raise ValueError(
                f"{self.status_host} can be reached by other machines, and the token of /status "
                f"would be read on its way: make a certificate with dure certificates, or say "
                f"--insecure"
            )

    @property
    def conditions(self) -> Conditions:
        return Conditions(engine=ENGINE, transfer_budget=self.transfer_budget)

    @property
    def serves(self) -> bool:
        return True

    def begin(self) -> None:
        """Raises ValueError where it could not serve: before anything is made or written."""
        self.context()
        _check_address(self.host, self.port)

    def describe(self) -> str:
        return "clients on a network"

    def run(
        self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        return run_server(program, report, self.conditions, self._carrier)

    def _carrier(self, federation: Federation, place: Place) -> Carrier:
        """Begins to serve, and returns what joins the coordinator with the clients.

        Raises ServeError where it cannot.
        """
        # Here, since the rest of dure does without these libraries.
        from dure.worlds.network.server.carrier import NetworkCarrier

        try:
            server = _Server(self, federation, place)
        # A certificate that is none, say, or a key that others may read.
        except ValueError as error:
            raise ServeError(str(error)) from error
        place.ending.callback(server.close)
        return NetworkCarrier(
            federation=federation,
            folder=server.folder,
            journal=server.journal,
            clock=server.clock,
            updates=server.updates,
            desk=server.desk,
            shelf=server.shelf,
            machine=server.machine,
            start_with=self.start_with or federation.clients,
            lasts=self.deadline,
            measure_seconds=self.measure_seconds,
            record=self.record,
            budget=Budget(self.conditions.bytes_each),
            interrupted=place.interrupted,
            tell=lambda text: place.report({"waiting": text}),
            watching=server.watching,
        )

    def status_context(self) -> tuple[ssl.SSLContext | None, Callable[[], None]]:
        """The same for /status: by the same certificate, where other machines can reach it."""
        if self.status_host in LOOPBACK or self.certificate is None:
            return None, lambda: None
        return replace(self, client_ca=None).context()

    def context(self) -> tuple[ssl.SSLContext | None, Callable[[], None]]:
        """(for TLS, what is called now and then to take in renewed certificates).

        Raises ValueError where there is no certificate and other machines could listen.
        """
        if self.certificate is not None:
            from dure.wire.certificates import Reloading, server_context

            certificate = Path(self.certificate)
            key = Path(self.key) if self.key else certificate.with_suffix(".key")
            client_ca = Path(self.client_ca) if self.client_ca else None
            context = server_context(certificate, key, client_ca)
            return context, _seldom(Reloading(context, certificate, key).look)
        if not self.insecure and self.host not in LOOPBACK:
            raise ValueError(
                f"{self.host} can be reached by other machines, and there is no certificate: make "
                f"one with dure certificates, or say --insecure"
            )
        return None, lambda: None


def run_server(
    program: Callable[[Place], Value],
    report: Callable[[dict[str, Any]], None],
    conditions: Conditions,
    carrier: Callable[[Federation, Place], Carrier],
) -> Value:
    """Runs the server half in this process. carrier: what joins it with its clients."""

    def here(place: Place) -> Value:
        place.conditions = conditions
        place.network = lambda federation: carrier(federation, place)
        return program(place)

    return run_here(here, report, "server", "clients", is_worker=False)


def _check_address(host: str, port: int) -> None:
    """Raises ValueError where nobody can listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        # As the server does: what ended a moment ago is in nobody's way.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"cannot listen at {host}, port {port}: {reason}; choose another --host or --port"
            ) from error


def _seldom(look: Callable[[], bool]) -> Callable[[], None]:
    """Looks every few seconds; warns of new certificates that will not do, and goes on."""
    next_time = time.monotonic() + RELOAD_SECONDS

    def moment() -> None:
        nonlocal next_time
        if time.monotonic() < next_time:
            return
        next_time = time.monotonic() + RELOAD_SECONDS
        try:
            look()
        except ValueError as error:
            warn(f"the renewed certificate is not used: {error}")

    return moment


def machine(federation: Federation) -> Machine:
    """How clients are to compute, so that they do what the simulation does."""
    from dure.tasks.trained import machine_of

    return machine_of(ENGINE, federation.threads)


def _both(*hear: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Several hear of each event."""

    def told(event: dict[str, Any]) -> None:
        for one in hear:
            one(event)

    return told


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Server:
    """All that lives while a server serves."""

    def __init__(self, world: Network, federation: Federation, place: Place) -> None:
        from dure.tasks.trained import differences
        from dure.wire.signatures import Key
        from dure.worlds.network.clock import Clock
        from dure.worlds.network.journal import Journal
        from dure.worlds.network.server.access import Access
        from dure.worlds.network.server.app import App
        from dure.worlds.network.server.attendance import Served
        from dure.worlds.network.server.desk import Desk
        from dure.worlds.network.server.log_lines import logged_to
        from dure.worlds.network.server.register import Register
        from dure.worlds.network.server.serving import Serving
        from dure.worlds.network.server.shelf import Shelf
        from dure.worlds.network.server.watching import Watching
        from dure.worlds.network.updates import Updates

        # What has begun ends with the run, also where the rest cannot begin.
        self.ending = place.ending.enter_context(contextlib.ExitStack())
        folder = place.folder
        if folder is None:
            folder = Path(self.ending.enter_context(tempfile.TemporaryDirectory(prefix="dure-")))
        context, renew = world.context()
        if world.log is not None:
            self.ending.enter_context(logged_to(Path(world.log)))
        run = str(place.config.get("run", ""))
        self.folder = folder
        self.key = Key.kept_in(folder / SIGNING_KEY)
        place.signs = self.key
        self.clock = Clock()
        self.journal = Journal(folder, self.clock, run)
        self.ending.callback(self.journal.close)
        self.watching = Watching(place.report)
        self.journal.synced = self.watching.sync_seconds.observe
        place.report = _both(self.watching.hears, place.report)
        # All rounds are to be in the log.
        place.report_seconds = 0.0
        self.updates = Updates(folder / "updates")
        self.desk = Desk(self.clock.now)
        self.shelf = Shelf()
        self.machine = machine(federation)
        # Sites whose own differ fetch them once.
        if federation.frozen:
            self.shelf.keep(federation.frozen)
        register = self.ending.enter_context(Register(folder / "clients.db", federation.clients))
        access = Access(register, world.access)
        served = Served(
            run=run,
            clients=federation.clients,
            strategy=dict(place.config.get("strategy", {})),
            seed=federation.seed,
            trains=federation.trains,
            machine=self.machine,
            heartbeat=world.heartbeat,
            patience=3 * world.heartbeat,
            compare=differences,
            samples=federation.samples,
        )
        self._renew = [renew]
        app = App(
            served,
            self.desk,
            self.shelf,
            self.journal,
            self.updates,
            access,
            watching=self.watching,
            every_moment=self._every_moment,
        )
        if world.status_port is not None:
            self._shows_status(world, access, place)
        self.serving = Serving(app.asgi(), world.host, world.port, context, app.lives_in)
        self.ending.callback(self.serving.stop)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{world.host}:{self.serving.port}"
        self.watching.serves(run, self.url, self.journal.resumed)
        place.report({"serving": self.url, "run": run})

    def _shows_status(self, world: Network, access: Access, place: Place) -> None:
        """Begins to serve what an operator sees, on a listener of its own."""
        from dure.worlds.network.server.cohort import differences
        from dure.worlds.network.server.serving import Serving
        from dure.worlds.network.server.status import TOKEN, Status, kept_token

        assert world.status_port is not None
        context, renew = world.status_context()
        self._renew.append(renew)
        status = Status(
            about={
                "run": place.config.get("run", ""),
                "task": place.config.get("task", {}),
                "system": place.config.get("strategy", {}),
                "versions": place.config.get("versions", {}),
                "signing_key": self.key.public,
            },
            watching=self.watching,
            desk=self.desk,
            access=access,
            journal=self.journal,
            clock=self.clock,
            differs=lambda seat: differences(seat.machine, self.machine),
            token=kept_token(self.folder),
        )
        serving = Serving(status.asgi(), world.status_host, world.status_port, context)
        self.ending.callback(serving.stop)
        scheme = "http" if context is None else "https"
        url = f"{scheme}://{_in_url(world.status_host)}:{serving.port}/status"
        place.report({"status": url, "token": str(self.folder / TOKEN)})

    def _every_moment(self) -> None:
        for renew in self._renew:
            renew()

    def close(self) -> None:
        """Ends. Clients of a run that is over hear of it; those of another one try again later."""
        self.watching.ends(self.desk.over or "the server stops")
        now = time.monotonic
        began = now()
        while self.desk.over and now() < began + LAST and self.desk.has_to_tell(began + FAREWELL):
            time.sleep(0.05)
        self.desk.pause()
        self.ending.close()
