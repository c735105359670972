"""World of clients on a network, which this process serves.

The server side runs here, driven by the same loop as every run; its carrier reads the clients'
messages from the journal in the run folder. The server reports the end of the run to the clients.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch

from dure.arguments import above, check_ranges
from dure.contracts.world import RankContext
from dure.errors import RunFolderError, ServeError, warn
from dure.fleet.budget import TransferBudget
from dure.fleet.conditions import ClientWorld, Conditions, EngineName
from dure.machine.devices import CPU, device_of, is_cpu
from dure.machine.extras import check_extra
from dure.protocol.carrier import Carrier
from dure.protocol.channels import Channels, HostedRun
from dure.protocol.server_context import ServerContext
from dure.record.disk import make_private
from dure.wire.layout import FederationSpec
from dure.wire.loopback import is_loopback
from dure.wire.requests import Machine, TaskDescription
from dure.worlds.in_process import run_in_process
from dure.worlds.launcher_environment import refuse_under_torchrun

if TYPE_CHECKING:
    from dure.deploy.server.app import App
    from dure.deploy.server.channels import NetworkChannels
    from dure.deploy.server.serving import HttpServer
    from dure.wire.owners_roster import OwnersRoster

Value = TypeVar("Value")

Mode = Literal["invited", "open"]

ENGINE: EngineName = "loop"
"""Engine of clients on a network: each client trains step by step."""

RELOAD_SECONDS = 5.0
"""Seconds between two checks of the certificate's files."""

SIGNING_KEY = "signing.key"
"""File in a run folder: the private key with which the server signs its models."""

FAREWELL = 3.0
"""Seconds that the server waits for clients to receive the end of the run."""

LAST = 60.0
"""Seconds in which clients that have received the end may fetch the last model."""


NEEDS = (
    "cryptography",
    "httptools",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "uvloop",
    "websockets",
)
"""Libraries of the extra "deploy"."""


@dataclass(frozen=True)
class Network(ClientWorld):
    """Clients on a network, which reach this server by HTTPS.

    Args:
        host: Address at which the server listens; 0.0.0.0 is reachable by other machines.
        port: Port of the server; 0 takes any free port.
        certificate: PEM file of the server's certificate (dure certificates makes one).
        key: PEM file of the certificate's private key; by default next to the certificate.
        client_ca: PEM file of the authority that signs clients' certificates, to require them.
        insecure: Allow plain HTTP even if other machines can reach the server.
        access: Clients that may take part: invited clients only, or any client (open).
        start_with: Number of available clients that the first round waits for; all by default.
        deadline: Timeout of a round in seconds, if its selection sets none.
        heartbeat: Seconds without a byte after which a connection counts as lost.
        measure_seconds: Timeout of an evaluation by clients, in seconds.
        exchange_seconds: Timeout of a step of secure aggregation, in seconds.
        record: Keep all received data, so that the run can be replayed.
        log: File for JSON lines of events, - for standard error; the file may be moved at any time,
            and the log continues in a new file.
        status_port: Port of /status, /metrics and /health; 0 takes any free port; no listener by
            default. RUN/status.token has the token for this listener.
        status_host: Address of that listener.
        transfer_budget: Maximum bytes that a client may receive and send in the run, such as 100MB.
        roster: JSON file of all clients' public keys, signed by the federation's owner (dure
            roster): no other client is enrolled, and clients that know the owner check the file.
        device: In split learning, device on which this server computes its part of the model.
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
    exchange_seconds: float = field(default=60.0, metadata=above(0))
    record: bool = False
    log: str | None = None
    status_port: int | None = None
    status_host: str = "127.0.0.1"
    transfer_budget: int | str | None = None
    roster: str | None = None
    device: str = "cpu"

    name: ClassVar[str] = "network"

    def __post_init__(self) -> None:
        check_extra("a network", "deploy", NEEDS)
        refuse_under_torchrun("a server")
        # Raises ValueError for a budget that is none.
        _ = self.conditions
        check_ranges(self)
        # Absolute paths, because a resumed run may be started in another folder.
        for name in ("certificate", "key", "client_ca", "log", "roster"):
            value = getattr(self, name)
            if value is not None and value != "-":
                object.__setattr__(self, name, str(Path(value).expanduser().resolve()))
        unsafe = not is_loopback(self.status_host) and self.certificate is None
        if self.status_port is not None and unsafe and not self.insecure:
            raise ValueError(
                f"{self.status_host} can be reached by other machines, and the token of /status "
                "could be read in transit: create a certificate with dure certificates, or "
                "accept it with --insecure"
            )

    @property
    def conditions(self) -> Conditions:
        return Conditions(engine=ENGINE, transfer_budget=self.transfer_budget)

    @property
    def serves(self) -> bool:
        return True

    @property
    def computes_on(self) -> tuple[str, ...]:
        return () if is_cpu(device_of(self.device)) else (self.device,)

    def begin(self, imports: Sequence[str] = ()) -> None:
        """Check the settings before anything is created.

        Raises ValueError if serving would fail.
        """
        device_of(self.device)
        self.context()
        self.listed()
        _check_address(self.host, self.port)

    def describe(self) -> str:
        return "clients on a network"

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        devices = (device_of(self.device),)
        return run_server(program, report, self.conditions, self._carrier, self._channels, devices)

    def _channels(self, hosted: HostedRun, context: ServerContext) -> Channels:
        """Start to serve clients that stay connected. Raises ServeError on failure."""
        for name, value in (
            ("start_with", self.start_with not in (None, hosted.clients)),
            ("record", self.record),
            ("status_port", self.status_port is not None),
            ("transfer_budget", self.transfer_budget is not None),
        ):
            if value:
                raise ServeError(
                    f"{name} is for federations: split learning starts with all its clients and "
                    "has no journal; leave it out"
                )
        with _as_serve_errors():
            return _Connected(self, hosted, context).channels

    def _carrier(self, federation: FederationSpec, context: ServerContext) -> Carrier:
        """Start to serve, and return the carrier between the coordinator and the clients.

        Raises ServeError on failure.
        """
        if self.computes_on:
            raise ServeError(
                f"device is {self.device}, but the server of a federation computes on the CPU: it "
                "is for split learning; leave it out"
            )
        # Imported here, because the rest of dure does not need these libraries.
        from dure.deploy.server.carrier import NetworkCarrier, ServingSettings

        with _as_serve_errors():
            server = _Server(self, federation, context)
        context.ending.callback(server.close)
        return NetworkCarrier(
            federation=federation,
            stores=server.stores,
            settings=ServingSettings(
                start_with=self.start_with or federation.clients,
                answer_timeout=self.deadline,
                measure_seconds=self.measure_seconds,
                record=self.record,
                exchange_seconds=self.exchange_seconds,
            ),
            machine=server.machine,
            budget=TransferBudget(self.conditions.bytes_each),
            interrupted=context.interrupted,
            tell=lambda text: context.report({"waiting": text}),
            server_metrics=server.server_metrics,
        )

    def listed(self) -> OwnersRoster | None:
        """Return the owner's roster of the clients; None without a roster.

        Raises ValueError for an invalid or expired roster.
        """
        if self.roster is None:
            return None
        from dure.wire.owners_roster import OwnersRoster, check_date

        roster = OwnersRoster.read(Path(self.roster))
        check_date(roster)
        return roster

    def status_context(self) -> tuple[ssl.SSLContext | None, Callable[[], None]]:
        """Return the TLS context of /status and the function that renews it, as `context` does.

        The context uses the server's certificate if other machines can reach the listener, else
        None.
        """
        if is_loopback(self.status_host) or self.certificate is None:
            return None, lambda: None
        return replace(self, client_ca=None).context()

    def context(self) -> tuple[ssl.SSLContext | None, Callable[[], None]]:
        """Return (TLS context or None, function called periodically to load renewed certificates).

        Raises ValueError if other machines can reach the server and there is no certificate.
        """
        if self.certificate is not None:
            from dure.wire.certificates import CertificateReloader, server_context

            certificate = Path(self.certificate)
            key = Path(self.key) if self.key else certificate.with_suffix(".key")
            client_ca = Path(self.client_ca) if self.client_ca else None
            context = server_context(certificate, key, client_ca)
            return context, _seldom(CertificateReloader(context, certificate, key).look)
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached by other machines, but there is no certificate: "
                "create one with dure certificates, or accept it with --insecure"
            )
        return None, lambda: None


def run_server(
    program: Callable[[RankContext], Value],
    report: Callable[[dict[str, Any]], None],
    conditions: Conditions,
    carrier: Callable[[FederationSpec, ServerContext], Carrier],
    channels: Callable[[HostedRun, ServerContext], Channels] | None = None,
    devices: tuple[torch.device, ...] = (CPU,),
) -> Value:
    """Run the server side in this process.

    Args:
        program: Function that trains, called with the server's context.
        report: Function that receives the events of the run.
        conditions: Conditions of the clients.
        carrier: Function that makes the carrier to the clients of a federation.
        channels: Function that makes the channels to clients that stay connected; None if the world
            does not support them.
        devices: Device on which the server computes.

    Returns:
        The result of `program`.
    """

    def here(context: RankContext) -> Value:
        server = ServerContext.of(context, conditions)
        server.network = lambda federation: carrier(federation, server)
        if channels is not None:
            server.channels = lambda hosted: channels(hosted, server)
        return program(server)

    return run_in_process(here, report, "server", "clients", devices, is_worker=False)


def _check_address(host: str, port: int) -> None:
    """Check that the server can listen at this address now. Raises ValueError otherwise."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        # As in the server: a socket that was closed a moment ago does not block the address.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"cannot listen at {host}, port {port}: {reason}; choose another --host or --port"
            ) from error


def _seldom(look: Callable[[], bool]) -> Callable[[], None]:
    """Return a function that calls `look` every few seconds, and warns of unusable certificates.

    The log has a line for each new certificate, accepted or refused.
    """
    from dure.deploy.server.server_metrics import log_event

    next_time = time.monotonic() + RELOAD_SECONDS

    def moment() -> None:
        nonlocal next_time
        if time.monotonic() < next_time:
            return
        next_time = time.monotonic() + RELOAD_SECONDS
        try:
            renewed = look()
        except ValueError as error:
            # Logged too, because nobody may watch the terminal until the old certificate expires.
            log_event("certificate refused", logging.WARNING, reason=str(error))
            warn(f"the renewed certificate is not used: {error}")
        else:
            if renewed:
                log_event("certificate renewed")

    return moment


def machine(threads: int) -> Machine:
    """Return the machine properties that clients need to compute the same bits as a simulation."""
    from dure.tasks.task_summary import machine_of

    return machine_of(ENGINE, threads)


@contextlib.contextmanager
def _as_serve_errors() -> Iterator[None]:
    """Context manager: convert ValueError, for example of a certificate or key, to ServeError."""
    try:
        yield
    except ValueError as error:
        raise ServeError(str(error)) from error


def _both(*hear: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Return a listener that forwards each event to several listeners."""

    def told(event: dict[str, Any]) -> None:
        for one in hear:
            one(event)

    return told


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_there(folder: Path, name: str, what: str) -> None:
    """Check that a required file exists if later files exist. Raises RunFolderError otherwise."""
    later = [folder / one for one in ("cohort.json", "models.jsonl") if (folder / one).exists()]
    later += (folder / "updates").glob("*.safetensors")
    later += (folder / "checkpoint").glob("[0-9]*")
    if later and not (folder / name).exists():
        raise RunFolderError(
            f"{folder / name} ({what}) is missing, but {later[0].name} exists: restore it from a "
            "copy, or start a new run"
        )


def _roster_of(world: Network, clients: int, folder: Path, resumed: bool) -> OwnersRoster | None:
    """Return the roster of the run in `folder`, and pin it.

    Raises ValueError for a roster that differs from the roster at the start of the run.
    """
    from dure.wire.owners_roster import FILE, PinnedOwnersRoster, check_count

    roster = world.listed()
    begun_with = (folder / FILE).exists()
    if roster is None:
        if begun_with:
            raise ValueError(f"the run in {folder} was started with a roster: use the same roster")
        return None
    if resumed and not begun_with:
        raise ValueError(f"the run in {folder} was started without a roster: start a new run")
    check_count(roster, clients)
    PinnedOwnersRoster(folder / FILE, f"the run in {folder}").take(roster)
    return roster


def _more_than(clients: int) -> Callable[[int], str | None]:
    """Return the `cohort_objection` of a run that starts when all its clients are available."""
    return lambda asked: f"the run has {clients} clients" if asked > clients else None


class _Serves:
    """Resources of a running server of either kind. `clients` is the number of clients."""

    def __init__(self, world: Network, clients: int, context: ServerContext) -> None:
        from dure.deploy.server.access import AccessControl
        from dure.deploy.server.log_lines import logged_to
        from dure.deploy.server.register import Register
        from dure.deploy.server.server_metrics import ServerMetrics
        from dure.wire.signatures import Key

        # Resources are released at the end of the run, even if the rest of the start fails.
        self.ending = context.ending.enter_context(contextlib.ExitStack())
        folder = context.folder
        if folder is None:
            folder = Path(self.ending.enter_context(tempfile.TemporaryDirectory(prefix="dure-")))
        self.world = world
        self.server_context = context
        self.clients = clients
        self.context, renew = world.context()
        self._renew = [renew]
        if world.log is not None:
            self.ending.enter_context(logged_to(Path(world.log)))
        self.run = str(context.config.get("run", ""))
        # The folder will contain names of people, updates, models and keys.
        make_private(folder)
        self.folder = folder
        self.resumed = (folder / "clients.db").exists()
        if self.resumed and not (folder / SIGNING_KEY).exists():
            warn(f"{folder / SIGNING_KEY} is missing: the model will be signed with a new key")
        self.key = Key.load_or_create(folder / SIGNING_KEY)
        context.signs = self.key
        self.server_metrics = ServerMetrics(context.report)
        context.report = _both(self.server_metrics.hears, context.report)
        # The log must have all rounds, so reports are not throttled.
        context.report_seconds = 0.0
        _check_there(folder, "clients.db", "who is enrolled")
        # Before the first client can be enrolled.
        self.roster = _roster_of(world, clients, folder, self.resumed)
        context.identities = None if self.roster is None else self.roster.identities
        register = self.ending.enter_context(Register(folder / "clients.db", clients))
        self.access = AccessControl(register, world.access, identities=context.identities)

    def told(
        self, clients: int, seed: int, trains: TaskDescription, threads: int
    ) -> dict[str, Any]:
        """Return the arguments of `ServedRun` that do not depend on the kind of server."""
        from dure.tasks.task_summary import differences

        return {
            "run": self.run,
            "clients": clients,
            "strategy": dict(self.server_context.config.get("strategy", {})),
            "seed": seed,
            "trains": trains,
            "machine": machine(threads),
            "heartbeat": self.world.heartbeat,
            "patience": 3 * self.world.heartbeat,
            "compare": differences,
            "roster": "" if self.roster is None else self.roster.to_json().decode(),
        }

    def opens(
        self, app: App | NetworkChannels, resumed: bool, heartbeat: float | None
    ) -> HttpServer:
        """Open the port. `heartbeat` is as in `HttpServer`."""
        from dure.deploy.server.serving import HttpServer

        world = self.world
        serving = HttpServer(
            app.asgi(), world.host, world.port, self.context, app.lives_in, heartbeat
        )
        self.ending.callback(serving.stop)
        scheme = "http" if self.context is None else "https"
        url = f"{scheme}://{world.host}:{serving.port}"
        self.server_metrics.serves(self.run, url, resumed)
        self.server_context.report({"serving": url, "run": self.run, "clients": self.clients})
        return serving

    def every_moment(self) -> None:
        for renew in self._renew:
            renew()


class _Connected(_Serves):
    """Server whose clients stay connected."""

    def __init__(self, world: Network, hosted: HostedRun, context: ServerContext) -> None:
        from dure.deploy.server.channels import NetworkChannels
        from dure.deploy.server.sessions import ServedRun

        super().__init__(world, hosted.clients, context)
        trains = hosted.trains or TaskDescription(forms={})
        told = self.told(hosted.clients, hosted.seed, trains, hosted.threads)
        if hosted.trains is None:
            told["compare"] = lambda theirs, ours: []
        self.channels = NetworkChannels(
            ServedRun(
                **told, samples=lambda examples: 0, cohort_objection=_more_than(hosted.clients)
            ),
            self.access,
            self.server_metrics,
            self.folder,
            self.key,
            world.deadline,
            self.every_moment,
        )
        context.ending.callback(self.close)
        serving = self.opens(self.channels, self.resumed, world.heartbeat)
        self.channels.alive = lambda: serving.alive

    def close(self) -> None:
        """Close the server.

        Clients learn of the end of a run; clients of an interrupted run retry.
        """
        self.server_metrics.ends("the run is over" if self.channels.is_over else "the server stops")
        until = time.monotonic() + FAREWELL
        while self.channels.is_over and self.channels.has_to_tell() and time.monotonic() < until:
            time.sleep(0.02)
        self.ending.close()


class _Server(_Serves):
    """Server of a federation, whose clients request their work."""

    def __init__(self, world: Network, federation: FederationSpec, context: ServerContext) -> None:
        from dure.deploy.clock import FederationClock
        from dure.deploy.journal import Journal
        from dure.deploy.server.app import App
        from dure.deploy.server.blob_cache import BlobCache
        from dure.deploy.server.carrier import ONCE, FederationStores
        from dure.deploy.server.model_digests import FILE, ModelDigests
        from dure.deploy.server.outbox import ClientOutbox
        from dure.deploy.server.sessions import ServedRun
        from dure.deploy.updates import Updates

        super().__init__(world, federation.clients, context)
        _check_there(self.folder, "journal.db", "all that clients have said")
        self.clock = FederationClock()
        self.journal = Journal(self.folder, self.clock, self.run)
        self.ending.callback(self.journal.close)
        self.journal.synced = self.server_metrics.sync_seconds.observe
        self.outbox = ClientOutbox(self.clock.now)
        self.stores = FederationStores(
            folder=self.folder,
            journal=self.journal,
            clock=self.clock,
            updates=Updates(self.folder / "updates"),
            outbox=self.outbox,
            cache=BlobCache(),
            models=ModelDigests(self.folder / FILE),
            once=self.folder / ONCE,
        )
        self.ending.callback(self.stores.models.close)
        self.machine = machine(federation.threads)
        # Sites with other frozen weights fetch them once.
        if federation.frozen:
            self.stores.cache.keep(federation.frozen)
        told = self.told(federation.clients, federation.seed, federation.trains, federation.threads)
        app = App(
            ServedRun(
                **told,
                samples=federation.samples,
                holds=federation.holds,
                cohort_objection=federation.cohort_objection,
            ),
            self.outbox,
            self.stores.cache,
            self.journal,
            self.stores.updates,
            self.access,
            server_metrics=self.server_metrics,
            every_moment=self.every_moment,
        )
        if world.status_port is not None:
            self._shows_status()
        self.serving = self.opens(app, self.journal.resumed, None)

    def _shows_status(self) -> None:
        """Start to serve the operator's status on a separate listener."""
        from dure.deploy.server.cohort import differences
        from dure.deploy.server.serving import HttpServer
        from dure.deploy.server.status import TOKEN, Status, load_or_create_token

        world = self.world
        place = self.server_context
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
            server_metrics=self.server_metrics,
            outbox=self.outbox,
            access=self.access,
            journal=self.journal,
            clock=self.clock,
            differs=lambda session: differences(session.machine, self.machine),
            token=load_or_create_token(self.folder),
        )
        secure = context is not None
        if place.page is not None:
            where = f"It is in {self.folder / TOKEN}."
            # Without plotly the listener has everything except the page.
            with contextlib.suppress(ImportError):
                status.page = place.page(status.token, where, secure, status.look)
        serving = HttpServer(status.asgi(), world.status_host, world.status_port, context)
        self.ending.callback(serving.stop)
        # The page is closed before its server: a viewer sees the end, and does not delay the
        # shutdown.
        if status.page is not None:
            self.ending.callback(status.page.close)
        scheme = "http" if context is None else "https"
        url = f"{scheme}://{_in_url(world.status_host)}:{serving.port}/status"
        place.report({"status": url, "token": str(self.folder / TOKEN)})

    def close(self) -> None:
        """Close the server.

        Clients learn of the end of a run; clients of an interrupted run retry.
        """
        self.server_metrics.ends(self.outbox.over or "the server stops")
        now = time.monotonic
        began = now()
        while (
            self.outbox.over and now() < began + LAST and self.outbox.has_to_tell(began + FAREWELL)
        ):
            time.sleep(0.05)
        self.outbox.pause()
        self.ending.close()
