"""A network of clients: this process serves, they come to it.

The server half runs here, driven by the same loop as every run; its carrier takes what clients say
from the journal in the run folder. Where the run ends, clients are told so.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from dure.contracts.channels import Channels, Hosted
from dure.contracts.strategy import Kind, Place, World
from dure.errors import RunFolderError, ServeError, warn
from dure.fleet.budget import Budget
from dure.fleet.conditions import Conditions, EngineName
from dure.machine.extras import check_extra
from dure.protocol.carrier import Carrier
from dure.record.disk import make_private
from dure.wire.layout import Federation
from dure.wire.loopback import is_loopback
from dure.wire.requests import Machine, Trains
from dure.worlds.here import run_here
from dure.worlds.launched import refuse_under_torchrun

if TYPE_CHECKING:
    from dure.wire.owners_roster import OwnersRoster
    from dure.worlds.network.server.app import App
    from dure.worlds.network.server.channels import NetworkChannels
    from dure.worlds.network.server.serving import Serving

Value = TypeVar("Value")

Mode = Literal["invited", "open"]

ENGINE: EngineName = "loop"
"""How clients on a network train: one client, step by step."""

RELOAD_SECONDS = 5.0
"""Seconds between two looks at the files of the certificate."""

SIGNING_KEY = "signing.key"
"""In a run folder: the private key by which the server signs its models."""

FAREWELL = 3.0
"""Seconds in which clients may hear that the run is over."""

LAST = 60.0
"""Seconds in which those who have heard it may fetch the last model."""


NEEDS = (
    "cryptography",
    "httptools",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "uvloop",
    "websockets",
)
"""The libraries of the extra "deploy"."""


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
        exchange_seconds: that clients may take for a step of secure aggregation.
        record: keep everything that came in, so that the run can be replayed.
        log: a file for JSON lines of what happens, - for standard error; it may be moved away at
            any time, and goes on in a new one.
        status_port: where /status, /metrics and /health are; 0 takes any that is free, and by
            default there is no such listener. The token for it is kept in RUN/status.token.
        status_host: the address of that listener.
        transfer_budget: bytes that a client may receive and send in the run, such as 100MB.
        roster: JSON file of all clients' public keys, signed by the federation's owner (dure
            roster): nobody else is enrolled, and clients that know the owner check it.
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
    exchange_seconds: float = 60.0
    record: bool = False
    log: str | None = None
    status_port: int | None = None
    status_host: str = "127.0.0.1"
    transfer_budget: int | str | None = None
    roster: str | None = None

    name: ClassVar[str] = "network"
    kind: ClassVar[Kind] = "clients"

    def __post_init__(self) -> None:
        check_extra("a network", "deploy", NEEDS)
        refuse_under_torchrun("a server")
        # Raises ValueError for a budget that is none.
        _ = self.conditions
        if not self.exchange_seconds > 0:
            raise ValueError(
                f"exchange_seconds is {self.exchange_seconds}, but clients need more than 0 "
                f"seconds to answer"
            )
        # A run that goes on may be started in another folder.
        for name in ("certificate", "key", "client_ca", "log", "roster"):
            value = getattr(self, name)
            if value is not None and value != "-":
                object.__setattr__(self, name, str(Path(value).expanduser().resolve()))
        unsafe = not is_loopback(self.status_host) and self.certificate is None
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

    def begin(self, imports: Sequence[str] = ()) -> None:
        """Raises ValueError where it could not serve: before anything is made or written."""
        self.context()
        self.listed()
        _check_address(self.host, self.port)

    def describe(self) -> str:
        return "clients on a network"

    def run(
        self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        return run_server(program, report, self.conditions, self._carrier, self._channels)

    def _channels(self, hosted: Hosted, place: Place) -> Channels:
        """Begins to serve clients that stay connected. Raises ServeError where it cannot."""
        for name, value in (
            ("start_with", self.start_with not in (None, hosted.clients)),
            ("record", self.record),
            ("status_port", self.status_port is not None),
            ("transfer_budget", self.transfer_budget is not None),
        ):
            if value:
                raise ServeError(
                    f"{name} is for federations: split learning begins with all its clients, and "
                    f"keeps no journal; leave it out"
                )
        with _as_serve_errors():
            return _Connected(self, hosted, place).channels

    def _carrier(self, federation: Federation, place: Place) -> Carrier:
        """Begins to serve, and returns what joins the coordinator with the clients.

        Raises ServeError where it cannot.
        """
        # Here, since the rest of dure does without these libraries.
        from dure.worlds.network.server.carrier import NetworkCarrier

        with _as_serve_errors():
            server = _Server(self, federation, place)
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
            models=server.models,
            exchange_seconds=self.exchange_seconds,
        )

    def listed(self) -> OwnersRoster | None:
        """Who the clients are, where their owner has signed it.

        Raises ValueError for a file that is no such roster, or has expired.
        """
        if self.roster is None:
            return None
        from dure.wire.owners_roster import OwnersRoster, check_date

        roster = OwnersRoster.read(Path(self.roster))
        check_date(roster)
        return roster

    def status_context(self) -> tuple[ssl.SSLContext | None, Callable[[], None]]:
        """The same for /status: by the same certificate, where other machines can reach it."""
        if is_loopback(self.status_host) or self.certificate is None:
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
        if not self.insecure and not is_loopback(self.host):
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
    channels: Callable[[Hosted, Place], Channels] | None = None,
) -> Value:
    """Runs the server half in this process. carrier, channels: what joins it with its clients."""

    def here(place: Place) -> Value:
        place.conditions = conditions
        place.network = lambda federation: carrier(federation, place)
        if channels is not None:
            place.channels = lambda hosted: channels(hosted, place)
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
    """Looks every few seconds; warns of new certificates that will not do, and goes on.

    The log has a line for each new certificate, also for one that is refused.
    """
    from dure.worlds.network.server.watching import told

    next_time = time.monotonic() + RELOAD_SECONDS

    def moment() -> None:
        nonlocal next_time
        if time.monotonic() < next_time:
            return
        next_time = time.monotonic() + RELOAD_SECONDS
        try:
            renewed = look()
        except ValueError as error:
            # Nobody may be looking at the terminal, and the old one expires.
            told("certificate refused", logging.WARNING, reason=str(error))
            warn(f"the renewed certificate is not used: {error}")
        else:
            if renewed:
                told("certificate renewed")

    return moment


def machine(threads: int) -> Machine:
    """How clients are to compute, so that they do what the simulation does."""
    from dure.tasks.trained import machine_of

    return machine_of(ENGINE, threads)


@contextlib.contextmanager
def _as_serve_errors() -> Iterator[None]:
    """What is wrong with a certificate, say, or a key that others may read, ends the run."""
    try:
        yield
    except ValueError as error:
        raise ServeError(str(error)) from error


def _both(*hear: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Several hear of each event."""

    def told(event: dict[str, Any]) -> None:
        for one in hear:
            one(event)

    return told


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_there(folder: Path, name: str, what: str) -> None:
    """Raise RunFolderError where a file is missing without which nothing later was written."""
    later = [folder / one for one in ("cohort.json", "models.jsonl") if (folder / one).exists()]
    later += (folder / "updates").glob("*.safetensors")
    later += (folder / "checkpoint").glob("[0-9]*")
    if later and not (folder / name).exists():
        raise RunFolderError(
            f"{folder / name} ({what}) is missing, but {later[0].name} is there: put back a copy "
            f"of it, or begin another run"
        )


def _roster_of(world: Network, clients: int, folder: Path, resumed: bool) -> OwnersRoster | None:
    """The roster of the run in `folder`. Raises ValueError for one that it was not begun with."""
    from dure.wire.owners_roster import FILE, Pinned, check_count

    roster = world.listed()
    begun_with = (folder / FILE).exists()
    if roster is None:
        if begun_with:
            raise ValueError(f"the run in {folder} was begun with a roster: go on with that one")
        return None
    if resumed and not begun_with:
        raise ValueError(f"the run in {folder} was begun without a roster: begin another run")
    check_count(roster, clients)
    Pinned(folder / FILE, f"the run in {folder}").take(roster)
    return roster


def _more_than(clients: int) -> Callable[[int], str | None]:
    """Why a run that begins once all its clients are there cannot have so many."""
    return lambda asked: f"the run has {clients} clients" if asked > clients else None


class _Serves:
    """What lives while a server serves, whatever it serves. clients: how many it has."""

    def __init__(self, world: Network, clients: int, place: Place) -> None:
        from dure.wire.signatures import Key
        from dure.worlds.network.server.access import Access
        from dure.worlds.network.server.log_lines import logged_to
        from dure.worlds.network.server.register import Register
        from dure.worlds.network.server.watching import Watching

        # What has begun ends with the run, also where the rest cannot begin.
        self.ending = place.ending.enter_context(contextlib.ExitStack())
        folder = place.folder
        if folder is None:
            folder = Path(self.ending.enter_context(tempfile.TemporaryDirectory(prefix="dure-")))
        self.world = world
        self.place = place
        self.clients = clients
        self.context, renew = world.context()
        self._renew = [renew]
        if world.log is not None:
            self.ending.enter_context(logged_to(Path(world.log)))
        self.run = str(place.config.get("run", ""))
        # Names of people, updates, models and keys come to lie there.
        make_private(folder)
        self.folder = folder
        self.resumed = (folder / "clients.db").exists()
        if self.resumed and not (folder / SIGNING_KEY).exists():
            warn(f"{folder / SIGNING_KEY} is missing: the model will be signed by a new key")
        self.key = Key.kept_in(folder / SIGNING_KEY)
        place.signs = self.key
        self.watching = Watching(place.report)
        place.report = _both(self.watching.hears, place.report)
        # All rounds are to be in the log.
        place.report_seconds = 0.0
        _check_there(folder, "clients.db", "who is enrolled")
        # Before the first client can be enrolled.
        self.roster = _roster_of(world, clients, folder, self.resumed)
        place.identities = None if self.roster is None else self.roster.identities
        register = self.ending.enter_context(Register(folder / "clients.db", clients))
        self.access = Access(register, world.access, identities=place.identities)

    def told(self, clients: int, seed: int, trains: Trains, threads: int) -> dict[str, Any]:
        """What clients are told of the run, as `Served` has it, but for their samples."""
        from dure.tasks.trained import differences

        return {
            "run": self.run,
            "clients": clients,
            "strategy": dict(self.place.config.get("strategy", {})),
            "seed": seed,
            "trains": trains,
            "machine": machine(threads),
            "heartbeat": self.world.heartbeat,
            "patience": 3 * self.world.heartbeat,
            "compare": differences,
            "roster": "" if self.roster is None else self.roster.to_json().decode(),
        }

    def opens(self, app: App | NetworkChannels, resumed: bool, heartbeat: float | None) -> Serving:
        """The port is open from here on. heartbeat: as `Serving` has it."""
        from dure.worlds.network.server.serving import Serving

        world = self.world
        serving = Serving(app.asgi(), world.host, world.port, self.context, app.lives_in, heartbeat)
        self.ending.callback(serving.stop)
        scheme = "http" if self.context is None else "https"
        url = f"{scheme}://{world.host}:{serving.port}"
        self.watching.serves(self.run, url, resumed)
        self.place.report({"serving": url, "run": self.run, "clients": self.clients})
        return serving

    def every_moment(self) -> None:
        for renew in self._renew:
            renew()


class _Connected(_Serves):
    """A server whose clients stay connected."""

    def __init__(self, world: Network, hosted: Hosted, place: Place) -> None:
        from dure.worlds.network.server.attendance import Served
        from dure.worlds.network.server.channels import NetworkChannels

        super().__init__(world, hosted.clients, place)
        trains = hosted.trains or Trains(forms={})
        told = self.told(hosted.clients, hosted.seed, trains, hosted.threads)
        if hosted.trains is None:
            told["compare"] = lambda theirs, ours: []
        self.channels = NetworkChannels(
            Served(**told, samples=lambda examples: 0, why_not=_more_than(hosted.clients)),
            self.access,
            self.watching,
            self.folder,
            self.key,
            world.deadline,
            self.every_moment,
        )
        place.ending.callback(self.close)
        serving = self.opens(self.channels, self.resumed, world.heartbeat)
        self.channels.alive = lambda: serving.alive

    def close(self) -> None:
        """Ends. Clients of a run that is over hear of it; those of another one try again later."""
        self.watching.ends("the run is over" if self.channels.is_over else "the server stops")
        until = time.monotonic() + FAREWELL
        while self.channels.is_over and self.channels.has_to_tell() and time.monotonic() < until:
            time.sleep(0.02)
        self.ending.close()


class _Server(_Serves):
    """A server of a federation, whose clients ask what there is to do."""

    def __init__(self, world: Network, federation: Federation, place: Place) -> None:
        from dure.worlds.network.clock import Clock
        from dure.worlds.network.journal import Journal
        from dure.worlds.network.server.app import App
        from dure.worlds.network.server.attendance import Served
        from dure.worlds.network.server.desk import Desk
        from dure.worlds.network.server.model_digests import FILE, ModelDigests
        from dure.worlds.network.server.shelf import Shelf
        from dure.worlds.network.updates import Updates

        super().__init__(world, federation.clients, place)
        _check_there(self.folder, "journal.db", "all that clients have said")
        self.clock = Clock()
        self.journal = Journal(self.folder, self.clock, self.run)
        self.ending.callback(self.journal.close)
        self.journal.synced = self.watching.sync_seconds.observe
        self.updates = Updates(self.folder / "updates")
        self.models = ModelDigests(self.folder / FILE)
        self.ending.callback(self.models.close)
        self.desk = Desk(self.clock.now)
        self.shelf = Shelf()
        self.machine = machine(federation.threads)
        # Sites whose own differ fetch them once.
        if federation.frozen:
            self.shelf.keep(federation.frozen)
        told = self.told(federation.clients, federation.seed, federation.trains, federation.threads)
        app = App(
            Served(
                **told,
                samples=federation.samples,
                holds=federation.holds,
                why_not=federation.why_not,
            ),
            self.desk,
            self.shelf,
            self.journal,
            self.updates,
            self.access,
            watching=self.watching,
            every_moment=self.every_moment,
        )
        if world.status_port is not None:
            self._shows_status()
        self.serving = self.opens(app, self.journal.resumed, None)

    def _shows_status(self) -> None:
        """Begins to serve what an operator sees, on a listener of its own."""
        from dure.worlds.network.server.cohort import differences
        from dure.worlds.network.server.serving import Serving
        from dure.worlds.network.server.status import TOKEN, Status, kept_token

        world = self.world
        place = self.place
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
            access=self.access,
            journal=self.journal,
            clock=self.clock,
            differs=lambda seat: differences(seat.machine, self.machine),
            token=kept_token(self.folder),
        )
        secure = context is not None
        if place.page is not None:
            where = f"It is in {self.folder / TOKEN}."
            # Without plotly the listener has all but the page.
            with contextlib.suppress(ImportError):
                status.page = place.page(status.token, where, secure, status.look)
        serving = Serving(status.asgi(), world.status_host, world.status_port, context)
        self.ending.callback(serving.stop)
        # Before that: whoever watches sees the end, and holds nobody up.
        if status.page is not None:
            self.ending.callback(status.page.close)
        scheme = "http" if context is None else "https"
        url = f"{scheme}://{_in_url(world.status_host)}:{serving.port}/status"
        place.report({"status": url, "token": str(self.folder / TOKEN)})

    def close(self) -> None:
        """Ends. Clients of a run that is over hear of it; those of another one try again later."""
        self.watching.ends(self.desk.over or "the server stops")
        now = time.monotonic
        began = now()
        while self.desk.over and now() < began + LAST and self.desk.has_to_tell(began + FAREWELL):
            time.sleep(0.05)
        self.desk.pause()
        self.ending.close()
