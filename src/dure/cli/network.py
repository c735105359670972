"""`dure serve` and `dure join`: a federation over a network, from the command line.

`dure serve --local` starts the clients too, as processes of this machine: a whole federation by a
single command.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dure.cli.flags import (
    LimitOptions,
    TrainOptions,
    given_options,
    names_before_flags,
    options_of_task,
    parse_flags,
    value_of,
)
from dure.cli.running import EventHandler, check_names, file_name, resume_run, run_folder, show_run
from dure.record.disk import make_folder, open_regular_file
from dure.wire.loopback import is_loopback

if TYPE_CHECKING:
    from dure.contracts.task import Task

HEARD = 1.0
"""Seconds that a client of --local gets to end by itself, after its server has ended."""

ENDS = 5.0
"""Seconds that a client of --local gets to end after SIGTERM, and after SIGKILL."""


@dataclass(frozen=True)
class LocalOptions:
    """Option for local clients.

    Args:
        local: start the clients too, as processes of this machine, each with its part of the data.
    """

    local: bool = False


@dataclass(frozen=True)
class JoinOptions:
    """Options of a client.

    Args:
        check: test network, certificate, disk and a batch, describe the data to be sent, and end.
        approve: consent to the run that the server serves, if policy.toml requires consent.
        token_file: a file with the token of an invitation, or - for standard input; other users of
            this machine can read the argument of --token.
        json: print events as JSON lines on standard output.
    """

    check: bool = False
    approve: bool = False
    token_file: Path | None = None
    json: bool = False


def serve(given: list[str]) -> int:
    """Run `dure serve TASK SYSTEM …`, or `dure serve --resume RUN`."""
    names, flags = names_before_flags(given)
    if not names and "--resume" in [flag.partition("=")[0] for flag in flags]:
        return _resumed(flags)
    if len(names) != 2:
        raise ValueError("dure serve TASK SYSTEM [options]: name a task and a federated system")
    reference, system = names
    check_names(reference, [system])
    if value_of("--keep-updates", flags) is not None:
        raise ValueError(
            "--keep-updates stores clients' updates with the examples of their training: only "
            "simulations can (dure train), not a server"
        )
    from dure.deploy.world import Network
    from dure.run.registry import strategy_class
    from dure.run.train import train
    from dure.tasks.builtin import load_task

    kind = strategy_class(system)
    if kind.traits.kind != "clients":
        raise ValueError(f"{system} has no clients: dure serve needs a federated system")
    parts = {
        "strategy": kind,
        "task": options_of_task(reference),
        "world": Network,
        "limits": LimitOptions,
        "where": LocalOptions,
        "how": TrainOptions,
    }
    about = "Serve a federation to clients on a network."
    asked = parse_flags(f"dure serve {reference} {system}", parts, flags, about)
    how: TrainOptions = asked["how"]
    if how.seeds != 1:
        raise ValueError("--seeds is for dure train and dure compare: a served run has one seed")
    world: Network = asked["world"]
    local: bool = asked["where"].local
    if local and world.roster is not None:
        raise ValueError(
            "--local starts clients with new keys, which are not on a roster: leave it out"
        )
    if local and value_of("--port", flags) is None:
        world = replace(world, port=0)
    if local:
        world = replace(world, access="open")
    options = given_options(asked["task"])
    task = how.with_weights(load_task(reference, **options))
    strategy = asked["strategy"]
    stop = asked["limits"].to_stop()
    with run_folder(how.out, f"{file_name(task)}-{strategy.name}") as out, _ending() as ending:
        command = "dure serve --local" if local else "dure serve"
        ending.enter_context(_before_a_round(command, out))
        on_event: EventHandler = JoinInstructions(
            reference, world.access == "invited", out, how.json
        )
        if local:
            if getattr(strategy, "clients", 0) is None:
                raise ValueError("the number of clients is missing: give it with --clients")
            on_event = LocalClients(ending, reference, options, out)
        return show_run(
            partial(train, task, strategy, world, stop, out=out, **how.of_train()),
            stop,
            quiet=how.json,
            as_json=how.json,
            folder=out,
            command=command,
            on_event=on_event,
        )


def _resumed(flags: list[str]) -> int:
    """Run `dure serve --resume RUN`; --local restarts its clients too."""
    with _ending() as ending:

        def make_handler(options: Mapping[str, Any]) -> EventHandler:
            if not options["where"].local:
                return lambda event: None
            from dure.run.config import run_request_of

            folder: Path = options["how"].resume
            was = run_request_of(folder)
            task = was.task.name or options["how"].task
            if task is None:
                raise ValueError("the task was created in Python: start its clients from Python")
            return LocalClients(ending, task, was.task.options, folder)

        command = "dure serve --local" if "--local" in flags else "dure serve"
        return resume_run(flags, command, {"where": LocalOptions}, make_handler)


@contextlib.contextmanager
def _before_a_round(command: str, folder: Path) -> Iterator[None]:
    """Context manager: after Ctrl-C before the first round, print the command that resumes."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.json").is_file():
            print(
                f"nothing is trained yet; resume with: {command} --resume {folder}", file=sys.stderr
            )
        raise


class JoinInstructions:
    """Prints the commands for clients, once the server's address is known."""

    def __init__(self, task: str, invited: bool, folder: Path, quiet: bool) -> None:
        self._task = task
        self._invited = invited
        self._folder = folder
        self._quiet = quiet

    def __call__(self, event: Mapping[str, Any]) -> None:
        if "serving" not in event or self._quiet:
            return
        url = event["serving"].replace("//0.0.0.0:", f"//{os.uname().nodename}:")
        tls = " --authority authority.pem" if url.startswith("https:") else _without_tls(url)
        token = " --token-file FILE" if self._invited else ""
        if self._invited:
            print(f"  invite a client: dure clients invite {self._folder}", file=sys.stderr)
        command = f"dure join {url} {self._task} --state DIR{tls}{token}"
        print(f"  a client joins:  {command}", file=sys.stderr, flush=True)


def _without_tls(url: str) -> str:
    """Return the flag for joining without TLS over a network; empty on loopback."""
    return "" if is_loopback(urlsplit(url).hostname or "") else " --insecure"


@contextlib.contextmanager
def _ending() -> Iterator[contextlib.ExitStack]:
    """Context manager: end what the block starts, and treat SIGTERM like Ctrl-C."""
    with contextlib.ExitStack() as ending:
        before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        ending.callback(signal.signal, signal.SIGTERM, before)
        yield ending


class LocalClients:
    """Starts a process for each client, once the server's address is known."""

    def __init__(
        self,
        ending: contextlib.ExitStack,
        task: str,
        options: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self._ending = ending
        self._task = task
        self._flags = [
            text for name, value in options.items() for text in (_flag(name), str(value))
        ]
        self._folder = folder

    def __call__(self, event: Mapping[str, Any]) -> None:
        if "serving" not in event:
            return
        url = event["serving"]
        processes = [self._start(client, url) for client in range(event["clients"])]
        self._ending.callback(_end, processes)

    def _start(self, client: int, url: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dure", "join", url, self._task]
        state = self._folder / "clients" / f"{client}"
        make_folder(state.parent)
        make_folder(state)
        command += [*self._flags, "--part", str(client), "--name", f"client {client}"]
        command += ["--state", str(state), *_without_tls(url).split()]
        with open(state / "output.txt", "ab", opener=open_regular_file) as output:
            # A session of its own: Ctrl-C reaches only the server, which ends its clients.
            return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for clients to end by themselves; then send SIGTERM, then SIGKILL."""
    for seconds, end in ((HEARD, None), (ENDS, signal.SIGTERM), (ENDS, signal.SIGKILL)):
        alive = [process for process in processes if process.poll() is None]
        if end is not None:
            for process in alive:
                process.send_signal(end)
        until = time.monotonic() + seconds
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


def join(given: list[str]) -> int:
    """Run `dure join URL TASK …`."""
    names, flags = names_before_flags(given)
    if len(names) != 2:
        raise ValueError("dure join URL TASK [options]: give the address of a server and a task")
    url, reference = names
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not the address of a server: write https://HOST:PORT")
    check_names(reference, [])
    from dure.cli.client_display import ClientDisplay
    from dure.cli.network import token_of
    from dure.deploy.client.site import ConnectionOptions
    from dure.peer_text import printable
    from dure.run import join as joins
    from dure.tasks.builtin import load_task

    parts = {"task": options_of_task(reference), "reach": ConnectionOptions, "how": JoinOptions}
    about = "Take part as a client in the federation of a server on the network."
    asked = parse_flags(f"dure join URL {reference}", parts, flags, about)
    reach: ConnectionOptions = asked["reach"]
    how: JoinOptions = asked["how"]
    reach = replace(reach, token=token_of(reach.token, how.token_file))
    task: Task = load_task(reference, **given_options(asked["task"]))
    stop = threading.Event()
    with ClientDisplay(how.json) as display, _stops(stop):
        if how.check:
            for line in joins.check(url, task, reach):
                print(printable(line))
            return 0
        try:
            over = joins.join(
                url, task, **vars(reach), approve=how.approve, stop=stop, on_progress=display
            )
        except joins.stopped() as ended:
            print(f"dure: {str(ended) or 'stopped'}", file=sys.stderr)
            return 130
        display("over", {"why": over})
    return 0


@contextlib.contextmanager
def _stops(stop: threading.Event) -> Iterator[None]:
    """Context manager: the first SIGINT or SIGTERM sets `stop`; the next ends the process."""

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


STANDARD_INPUT = "-"

_MOST = 4096
"""Most bytes of a token and the end of its line; a token of dure has 32 digits."""


def token_of(token: str, file: Path | None) -> str:
    """Return the token that a command was given; empty without a token.

    Args:
        token: the argument of `--token`, a token or `-`.
        file: the argument of `--token-file`: a file, a pipe, or `-`.

    Raises:
        ValueError: if both are given, or there is no token.
    """
    if token and file is not None:
        raise ValueError("the token is given twice: leave --token or --token-file out")
    if STANDARD_INPUT in (token, str(file)):
        return _checked(_typed(), "standard input")
    return token if file is None else _checked(_read(file), str(file))


def _typed() -> str:
    # Without an echo, if a person types.
    return getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline(_MOST + 1)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST + 1).decode("ascii")
    except OSError as error:
        raise ValueError(f"cannot read the token in {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} contains no token") from error


def _checked(text: str, where: str) -> str:
    # A single word: no other content of a file may be sent to a server.
    if len(text) > _MOST or len(text.split()) != 1:
        raise ValueError(
            f"{where} contains no token: a token is one word, as printed by dure clients invite"
        )
    return text.strip()
