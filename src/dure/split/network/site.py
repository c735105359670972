"""A client of a run over a network: frames in, frames out.

What it computes is the state machine's (`dure.split.client`). Here its head is sealed for the next
client and opened where it comes, and what it knew after its newest turns is written down before the
server hears that it has ended one, so that it may be killed at any moment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import RunFolderError, StateError
from dure.fleet.virtual import Envelope, Node
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.checkpoint import read_tree, write_tree
from dure.record.disk import write_atomically
from dure.record.weights import weights_to_bytes
from dure.split.client import Client, HeadError, Kept
from dure.split.messages import SERVER, Handed, Own, Turn, client
from dure.split.network.control import (
    Answer,
    Final,
    HeadRefused,
    Hello,
    Measure,
    Measured,
    Members,
    Query,
    Sealed,
)
from dure.split.network.frames import Frame, FrameError, decode, encode
from dure.split.network.incoming import CheckedClient, Patience
from dure.split.network.outgoing import Says, say
from dure.split.received import ReceivedError
from dure.split.states import read, written
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode
from dure.wire.boxes import BoxKey, Member
from dure.wire.roster import Pinned, Roster
from dure.wire.sealing import About, SealError, seal, unseal
from dure.wire.signatures import Key


class Identity:
    """The keys of a client. own: what it says of itself to all others. known: others, by number, of
    whom its user knows the keys; None: nobody has been asked."""

    def __init__(
        self,
        key: Key,
        box: BoxKey,
        own: Member,
        run: str,
        pinned: Pinned,
        known: Mapping[int, str] | None,
    ) -> None:
        self.key = key
        self.box = box
        self.own = own
        self.run = run
        self.pinned = pinned
        self.known = known

    def takes(self, roster: bytes) -> Roster:
        """Raises RosterError for one that is not the first, or not signed, or has a stranger."""
        return self.pinned.take(Roster.from_json(roster), self.own, known=self.known)

    def member(self, number: int) -> Member:
        assert self.pinned.roster is not None
        return self.pinned.roster.member(number)

    def seals(self, turn: int, receiver: int, frame: Frame) -> Tensor:
        """A frame that only one client can read."""
        about = About(self.run, turn, self.own.number, receiver)
        sealed = seal(encode(frame), to=self.member(receiver), identity=self.key, about=about)
        return torch.frombuffer(sealed, dtype=torch.uint8)

    def opens(self, turn: int, sender: int, content: Tensor) -> Frame:
        """The inverse. Raises SealError for what is not from that client, for this one."""
        about = About(self.run, turn, sender, self.own.number)
        sealed: Any = content.numpy()
        return decode(unseal(sealed, box=self.box, sender=self.member(sender), about=about))


class AtClient(ABC):
    """What a client computes for evaluations, with its newest head."""

    @abstractmethod
    def query(self, inputs: Any, targets: Any, examples: int, of: int) -> Query:
        """What the server is sent of a batch; of: how many examples are measured in all."""

    @abstractmethod
    def outputs(self, answer: Answer, inputs: Any, examples: int) -> Any:
        """What the model gives, of what the server has made of that; None where the server measures
        it."""


@dataclass(frozen=True)
class Working:
    """A client at work.

    checked: the client, whose server's messages are checked. names: of the weights of its head, and
    of its buffers. most: bytes of what the server may say at once.
    """

    checked: CheckedClient
    node: Node
    at_client: AtClient
    names: Sequence[str]
    most: int

    @property
    def machine(self) -> Client:
        return self.checked.machine


@dataclass(frozen=True)
class SiteLimits:
    """What a site allows its server, by its policy.

    largest_gradient: the norm of the gradients of a batch; None: by those before. give_up: seconds
    for which it waits where nothing goes on. refusal(round, examples): why a model is not
    measured, empty where it may be, and then it counts.
    """

    largest_gradient: float | None = None
    give_up: float | None = None
    refusal: Callable[[int, int], str] = lambda round, examples: ""


UNLIMITED = SiteLimits()


class Site:
    """A client of a run. folder: where it keeps what it knew; None keeps it in memory.

    makes: the client at work, given what the server says of the run. model: of which it has a part.
    event: hears of what happens. limits: what the site allows.
    """

    def __init__(
        self,
        task: Task,
        identity: Identity,
        makes: Callable[[Members], Working],
        model: nn.Module,
        test: Examples | None,
        hello: Hello,
        group: Group,
        folder: Path | None,
        event: Callable[[str, Mapping[str, object]], None],
        limits: SiteLimits = UNLIMITED,
    ) -> None:
        self.limits = limits
        self.patience = Patience(limits.give_up)
        self.task = task
        self.identity = identity
        self.makes = makes
        self.model = model
        self.test = test
        self.hello = hello
        self.group = group
        self.folder = folder
        self.event = event
        self._working: Working | None = None
        self._final: Own | None = None
        self._round = 0
        self._written: set[int] = {-1}

    @property
    def working(self) -> Working:
        if self._working is None:
            raise StateError("the server trains before it has said who takes part")
        return self._working

    @property
    def machine(self) -> Client:
        return self.working.machine

    @property
    def at(self) -> str:
        """What it is at, for errors."""
        return f"round {self._round + 1}"

    def talks(self, channel: Says) -> None:
        """Until the channel ends, by the error that it raises."""
        say(channel, self.hello, encode(self.hello))
        greeted = False
        while True:
            frame = decode(channel.next(self.patience.left if greeted else None))
            # What the server says before it has noticed that this client came anew is for the one
            # that it was.
            greeted = greeted or isinstance(frame, Members)
            if not greeted:
                continue
            for said in self._hears(frame, channel):
                say(channel, said, encode(said))
            if self._working is not None:
                self.patience.note(self.working.checked.accepted)
                with self._as_drawn():
                    self.machine.meanwhile()

    def _hears(self, frame: Frame, channel: Says) -> list[Frame]:
        if isinstance(frame, Members):
            roster = self.identity.takes(frame.roster)
            self.event("roster", {"clients": len(roster.members), "is": roster.fingerprint})
            if self._working is None:
                self._working = self.makes(frame)
                self._read_kept()
            channel.allow(self.working.most)
            return []
        if isinstance(frame, Final):
            self._check_given(frame.head)
            self._final = frame.head
            return []
        if isinstance(frame, Measure):
            return [self._measures(frame, channel)]
        if isinstance(frame, Sealed):
            return self._takes_head(frame)
        return self._trains(SERVER, frame)

    def _takes_head(self, sealed: Sealed) -> list[Frame]:
        """Train with the head of another client; where it cannot be, say so and wait."""
        try:
            return self._trains(client(sealed.peer), self._opened(sealed))
        # It was damaged by the sender, or on the way: this client can go on.
        except HeadError as error:
            self.event("waiting", {"why": str(error)})
            return [HeadRefused(sealed.turn, str(error))]

    def _opened(self, sealed: Sealed) -> Handed:
        """Raises HeadError for what is no head that the other client has sealed for this turn."""
        try:
            handed = self.identity.opens(sealed.turn, sealed.peer, sealed.content)
        except (SealError, FrameError) as error:
            raise HeadError(sealed.turn, str(error)) from error
        if not isinstance(handed, Handed) or handed.turn != sealed.turn:
            sender = client(sealed.peer)
            raise HeadError(sealed.turn, f"{sender} has sealed something else than its head")
        return handed

    def _trains(self, sender: str, message: Any) -> list[Frame]:
        self._tells(message)
        with self._as_drawn():
            said = self.working.node.receive(sender, message, 0.0)
        self._write_kept()
        return [self._out(envelope) for envelope in said]

    @contextmanager
    def _as_drawn(self) -> Iterator[None]:
        """Examples may draw as they are read, from generators that go on afterwards as before."""
        before = generators_state() if self.machine.examples.draws else None
        yield
        if before is not None:
            restore_generators(before)

    def _out(self, envelope: Envelope) -> Frame:
        to, message = envelope
        if to == SERVER:
            return message  # type: ignore[no-any-return]
        receiver = int(to.removeprefix("client "))
        content = self.identity.seals(message.turn, receiver, message)
        about = {"round": self._round, "bytes": content.nbytes}
        self.event("sending", about)
        return Sealed(message.turn, receiver, content)

    def _tells(self, message: Any) -> None:
        if isinstance(message, Turn):
            self._round = message.round
            self.event("training", {"round": message.round})

    def _check_given(self, head: Own) -> None:
        """Raises ReceivedError for a head of the server's own where it is to have none, and for one
        of another model."""
        if not self.working.checked.rules.returns:
            raise ReceivedError(
                "the server sends a head of its own, and heads do not reach it in this run"
            )
        self.working.checked.check_head(SERVER, head)

    # Evaluation

    def _measures(self, measure: Measure, channel: Says) -> Measured:
        """The model with the newest head, of which the server computes its part, on test data."""
        if measure.head is not None:
            self._check_given(measure.head)
        if self.test is None:
            return Measured(measure.round, {})
        refusal = self.limits.refusal(measure.round, len(self.test))
        if refusal:
            self.event("left", {"why": refusal})
            return Measured(measure.round, {})
        self.event("measuring", {"round": measure.round})
        own = measure.head or self.machine.after(measure.since).own
        self.machine.party.side.take(own)
        measurement = Measurement(self.task, examples=len(self.test), share=len(self.test))
        with in_mode(self.model, training=False):
            for indices in torch.split(torch.arange(len(self.test)), self.task.eval_batch_size):
                inputs, targets = self.test.batch(indices)
                outputs = self._outputs(len(indices), inputs, targets, channel)
                if outputs is not None:
                    measurement.add(outputs, targets, len(indices))
        if not measurement.measured:
            return Measured(measure.round, {})
        values = measurement.values(self.group)
        finite = {f"test_{name}": one for name, one in values.items() if math.isfinite(one)}
        return Measured(measure.round, finite)

    def _outputs(self, examples: int, inputs: Any, targets: Any, channel: Says) -> Any:
        """What the model gives for these, of which the server computes a part."""
        at_client = self.working.at_client
        assert self.test is not None
        query = at_client.query(inputs, targets, examples, len(self.test))
        say(channel, query, encode(query))
        answer = decode(channel.next(self.patience.left))
        if not isinstance(answer, Answer):
            raise StateError(f"the server was asked to compute, and says {type(answer).__name__}")
        return at_client.outputs(answer, inputs, examples)

    # What it knew after its newest turns

    def export(self) -> None:
        """Writes the head that it has in the end, for use alone."""
        if self.folder is None or self._working is None:
            return
        newest = self.machine.after(max(self.machine.kept)).own
        own = self._final or newest
        tensors = dict(zip(self.working.names, [*own.weights, *own.buffers], strict=True))
        path = self.folder / f"head-{self.identity.run}.safetensors"
        write_atomically(path, weights_to_bytes(tensors))
        self.event("head", {"path": str(path)})

    def _write_kept(self) -> None:
        """Writes down what is new, and forgets what the server will not come back to."""
        kept = self.machine.kept
        if self.folder is None or kept.keys() == self._written:
            return
        for turn in kept.keys() - self._written:
            own, memory = kept[turn]
            write_tree(self._file(turn), {"own": written(own), "memory": memory})
        for turn in self._written - kept.keys():
            self._file(turn).unlink(missing_ok=True)
        self._written = set(kept)

    def _read_kept(self) -> None:
        if self.folder is None:
            return
        for path in sorted(self.folder.glob(f"head-{self.identity.run}-*.tree")):
            turn = int(path.stem.rpartition("-")[2])
            try:
                found = read_tree(path)
                own = read(found["own"])
                self.machine.party.side.check_kept(own)
                self.machine.kept[turn] = Kept(own, found["memory"])
            except RunFolderError as error:
                raise StateError(str(error)) from error
            except Exception as error:
                raise StateError(f"{path} is damaged: {error}") from error
            self._written.add(turn)

    def _file(self, turn: int) -> Path:
        assert self.folder is not None
        return self.folder / f"head-{self.identity.run}-{turn}.tree"
