"""A federation for tests: a real server on loopback, and clients in threads of this process."""

from __future__ import annotations

import _thread
import ssl
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dure
from dure.deploy.server.serving import HttpServer
from dure.deploy.world import Network
from dure.run.join import join
from dure.wire.certificates import issue_client, pair_in
from small import small_task

Hears = Callable[["Federation", dict[str, Any]], object]


class Federation:
    """One run, with what was told of it.

    hears: called in the server's thread with each event of the run.
    """

    def __init__(self, clients: int = 2, hears: Hears = lambda one, event: None) -> None:
        self.clients = clients
        self.events: list[dict[str, Any]] = []
        self.of_clients: list[tuple[str, dict[str, object]]] = []
        self.where: dict[str, str] = {}
        self.certificates: Path | None = None
        """Where those of the authority and of clients are; None: without TLS."""
        self._hears = hears
        self._serves = threading.Event()

    def run(
        self,
        out: Path,
        rounds: int = 3,
        checkpoint_every: int | None = None,
        held_out: float = 0.2,
        **world: Any,
    ) -> dure.Run:
        """Trains a small task by FedAvg."""
        threads = [
            threading.Thread(target=self._client, args=(number,), daemon=True)
            for number in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        try:
            run = dure.train(
                small_task(),
                dure.FedAvg(clients=self.clients, batch_size=4, held_out=held_out),
                Network(port=0, access="open", **world),
                dure.Stop(rounds=rounds),
                out=out,
                checkpoint_every=checkpoint_every,
                on_progress=self._told,
            )
        finally:
            self._serves.set()  # or never will
        for thread in threads:
            thread.join(20)
        return run

    def _told(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.where.update({key: event[key] for key in ("status", "token") if key in event})
        if "serving" in event:
            self.where["serving"] = event["serving"]
            self._serves.set()
        self._hears(self, event)

    def _client(self, number: int) -> None:
        self._serves.wait(20)
        if "serving" not in self.where:
            return

        def told(what: str, about: Any) -> None:
            self.of_clients.append((what, dict(about)))

        try:
            tls = {} if self.certificates is None else identity(self.certificates, number)
            url = self.where["serving"]
            join(url, small_task(), name=f"c{number}", part=number, on_progress=told, **tls)
        # The server would wait for it for ever.
        except Exception:
            traceback.print_exc()
            _thread.interrupt_main()

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        """(status, body) of what the listener for operators answers."""
        headers = {} if token is None else {"authorization": token}
        return got(self.where["status"].replace("/status", path), headers)

    def bearer(self) -> str:
        return f"Bearer {Path(self.where['token']).read_text().strip()}"


def identity(folder: Path, number: int) -> dict[str, Path]:
    """Who a client trusts, and a certificate of its own."""
    return {
        "authority": pair_in(folder, "authority").certificate,
        "certificate": issue_client(folder, f"c{number}").certificate,
    }


def got(
    url: str, headers: Mapping[str, str], context: ssl.SSLContext | None = None
) -> tuple[int, str]:
    """(status, body) of an answer."""
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def served(app: Any) -> Iterator[Callable[..., tuple[int, str]]]:
    """Serves an application on loopback, and gives what asks it: (path, headers)."""
    serving = HttpServer(app, "127.0.0.1", 0, None)
    try:
        yield lambda path, headers={}: got(f"http://127.0.0.1:{serving.port}{path}", headers)
    finally:
        serving.stop()
