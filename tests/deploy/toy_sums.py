"""A toy protocol: clients keep their updates, and a server adds up what they say of them.

Step 0 is a greeting; what is said in step 1 has a vector besides. Nothing is masked. What clients
say is drawn by them, so that a test can search for it; the server adds something that it draws.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dure
from dure.deploy.client.link import Backoff
from dure.deploy.client.loop import ClientLoop
from dure.deploy.client.site import ConnectionOptions, opened
from dure.federated import builders
from dure.federated.server.server import FederatedServer
from dure.protocol.messages import ProtocolAnswer, ProtocolStep, Update, WantedTensor
from dure.run.client_training import ClientTraining
from dure.wire.layout import FederationSpec
from small import small_task

WANTS = (WantedTensor("int32", (7,)),)
SEED = 20240229
"""What each client adds to the vector, besides its number."""


def install(notes: Path, patch: Callable[[object, str, Any], object] = setattr) -> None:
    """From now on servers of this process add up. notes: gets a line for each time that they make
    a sum, and use one."""

    def holds(**said: Any) -> FederationSpec:
        return FederationSpec(**{**said, "holds": True})

    def fold(server: FederatedServer, tickets: Sequence[int]) -> None:
        adds_up(server, tickets, notes)

    patch(builders, "FederationSpec", holds)
    patch(FederatedServer, "_fold", fold)


def adds_up(server: FederatedServer, tickets: Sequence[int], notes: Path) -> None:
    """In the place of `FederatedServer._fold`."""
    coordinator, carrier = server.coordinator, server.carrier
    asked = {ticket: coordinator.assignment(ticket) for ticket in tickets}
    carrier.hold(coordinator, tickets)

    def make() -> dict[str, Any]:
        greeted = _step(0, {ticket: one.client for ticket, one in asked.items()})
        answered = _step(1, {one.ticket: one.client for one in greeted}, WANTS)
        drawn = secrets.randbelow(1 << 40)
        note(notes, f"made {drawn}")
        total = sum((one.tensors[0] for one in answered), torch.zeros(7, dtype=torch.int32))
        return {"in": sorted(one.ticket for one in answered), "total": total, "drawn": drawn}

    def _step(
        stage: int, whom: dict[int, int], wants: Sequence[WantedTensor] = ()
    ) -> list[ProtocolAnswer]:
        body = f"step {stage}".encode()
        says = [ProtocolStep(ticket, client, stage, body, wants) for ticket, client in whom.items()]
        return list(carrier.exchange(says))

    tree = carrier.once(f"sum {coordinator.model.number}", make)
    note(notes, f"used {tree['drawn']}")
    move = float(tree["total"].sum()) * 1e-12 + tree["drawn"] * 1e-15
    for ticket, one in asked.items():
        inside = ticket in tree["in"]
        update = Update(
            ticket=ticket,
            client=one.client,
            round=one.round,
            examples=1,
            samples=1,
            loss=0.0,
            delta=[torch.full_like(flat, move) for flat in one.weights] if inside else [],
            buffers=list(one.buffers) if inside else [],
            failure=None if inside else "its loss became not finite",
        )
        coordinator.fold(update)


def note(notes: Path, line: str) -> None:
    with open(notes, "a") as file:
        file.write(f"{line}\n")


def noted(notes: Path, what: str) -> list[str]:
    """What was noted after this word, in order."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [line.split()[1] for line in lines if line.startswith(f"{what} ")]


class Toy(ClientTraining):
    """A site whose answers are drawn; `said` has them. answers: in place of how it answers."""

    said: list[bytes]
    answers: (
        Callable[
            [ProtocolStep, Callable[[ProtocolStep], ProtocolAnswer | None]], ProtocolAnswer | None
        ]
        | None
    ) = None

    def begin(self, welcome: Any, memory: Any) -> None:
        super().begin(welcome, memory)
        self.said = []
        self.held: set[int] = set()
        # The protocol of the product is not this one.
        self.clients.hold = lambda update, asked: self.held.add(update.ticket)  # type: ignore

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        return self.answers(say, self.honest) if self.answers else self.honest(say)

    def honest(self, say: ProtocolStep) -> ProtocolAnswer | None:
        if say.ticket not in self.held:
            return None
        body = secrets.token_bytes(48)
        self.said.append(body)
        tensors = []
        if say.wants:
            # The middle is drawn too, and adds nothing.
            drawn = secrets.randbelow(1 << 30)
            tensors = [torch.tensor([SEED, drawn, -drawn, say.client, 0, 0, 0]).int()]
            self.said.append(tensors[0].numpy().tobytes())
        return ProtocolAnswer(say.ticket, say.client, say.stage, body, tensors)


class Played:
    """A client in a thread of this process. heard: what its loop told."""

    def __init__(
        self,
        url: str,
        number: int,
        state: Path | None = None,
        task: dure.Task | None = None,
        answers: Any = None,
    ) -> None:
        self.site = Toy(task or small_task(), f"toy {number}", number)
        self.site.answers = answers
        self.heard: list[tuple[str, dict[str, object]]] = []
        self.stop = threading.Event()
        self.ended: str | BaseException = "it has not"
        self._reach = ConnectionOptions(name=self.site.name, state=state, part=number)
        self._url = url
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def _play(self) -> None:
        try:
            with opened(self._url, self._reach, self.stop) as (session, *_):
                # A test has no time to be patient with a server that is killed.
                session._backoff = Backoff(most=0.2)
                self.site.begin(session.check_in(self.site.enter()), None)
                session.belongs(session.check_in(self.site.enter()), self.site.name)
                told = lambda what, about: self.heard.append((what, dict(about)))  # noqa: E731
                self.ended = ClientLoop(session, self.site, told).run()
        except BaseException as error:
            self.ended = error

    def leave(self) -> None:
        """Without a word."""
        self.stop.set()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def words(self, what: str) -> list[dict[str, object]]:
        return [about for kind, about in self.heard if kind == what]


@contextmanager
def playing(*clients: Played) -> Iterator[None]:
    """They end with the block."""
    try:
        yield
    finally:
        for client in clients:
            client.leave()
        for client in clients:
            client.join()
