"""A client of a run over a network: frames in, frames out.

The state machine is `dure.split.client`. This module encrypts the head for the next client and
decrypts a received head. The state after the newest turns is on disk before the server is notified
of the end of a turn, so that the process may be killed at any moment.
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
from dure.data.examples import Examples, reader_on
from dure.errors import RunFolderError, StateError
from dure.fleet.virtual_network import Envelope, Node
from dure.machine.devices import CPU
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.checkpoint import read_tree, write_tree
from dure.record.disk import write_atomically
from dure.record.weights import weights_to_bytes
from dure.split.client import HeadError, SplitClient, SplitClientState
from dure.split.gradient_bound import ReceivedError
from dure.split.messages import SERVER, HeadHandover, SideState, Turn, client
from dure.split.network.control import (
    Final,
    HeadRefused,
    Hello,
    MeasureModel,
    ModelMeasured,
    Query,
    QueryAnswer,
    RosterMembers,
    SealedHead,
)
from dure.split.network.frames import Frame, SplitFrameError, decode, encode, values_on
from dure.split.network.incoming import CheckedClient, ProgressTimeout
from dure.split.network.outgoing import ServerChannel, say
from dure.split.sides import state_from_tree, state_to_tree
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode
from dure.wire.boxes import BoxKey, Member
from dure.wire.roster import PinnedRoster, Roster
from dure.wire.sealing import SealedMessageContext, SealError, seal, unseal
from dure.wire.signatures import Key


class Identity:
    """Keys of a client.

    Args:
        key: signature key.
        box: encryption key.
        own: its entry in the roster.
        run: identifier of the run.
        pinned: the roster that was accepted first.
        known: public keys or fingerprints of other clients that the user knows, by number; None:
            not given.
    """

    def __init__(
        self,
        key: Key,
        box: BoxKey,
        own: Member,
        run: str,
        pinned: PinnedRoster,
        known: Mapping[int, str] | None,
    ) -> None:
        self.key = key
        self.box = box
        self.own = own
        self.run = run
        self.pinned = pinned
        self.known = known

    def takes(self, roster: bytes) -> Roster:
        """Return the roster. Raises RosterError if it is changed, unsigned, or has unknown keys."""
        return self.pinned.take(Roster.from_json(roster), self.own, known=self.known)

    def member(self, number: int) -> Member:
        assert self.pinned.roster is not None
        return self.pinned.roster.member(number)

    def seals(self, turn: int, receiver: int, frame: Frame) -> Tensor:
        """Return a frame encrypted for the client `receiver`."""
        about = SealedMessageContext(self.run, turn, self.own.number, receiver)
        sealed = seal(encode(frame), to=self.member(receiver), identity=self.key, about=about)
        return torch.frombuffer(sealed, dtype=torch.uint8)

    def opens(self, turn: int, sender: int, content: Tensor) -> Frame:
        """Return the decrypted frame. Raises SealError unless `sender` sealed it for the client."""
        about = SealedMessageContext(self.run, turn, sender, self.own.number)
        sealed: Any = content.numpy()
        return decode(unseal(sealed, box=self.box, sender=self.member(sender), about=about))


class ClientPartInterface(ABC):
    """Interface to the client's part in evaluation, with its newest head."""

    @abstractmethod
    def query(self, inputs: Any, targets: Any, examples: int, of: int) -> Query:
        """Return the query for a batch; of: total number of examples that are measured."""

    @abstractmethod
    def outputs(self, answer: QueryAnswer, inputs: Any, examples: int) -> Any:
        """Return the model's output from the server's answer; None if the server measures."""


@dataclass(frozen=True)
class SiteClient:
    """State machine of a client, with the checks around it.

    checked: the client with checks of its server's messages. names: of the weights of its head, and
    of its buffers. most: maximum bytes of a message of the server.
    """

    checked: CheckedClient
    node: Node
    at_client: ClientPartInterface
    names: Sequence[str]
    most: int

    @property
    def machine(self) -> SplitClient:
        return self.checked.machine


@dataclass(frozen=True)
class SiteLimits:
    """Limits of a site for its server, from its policy.

    largest_gradient: maximum norm of a batch's gradients; None: by the gradients before. give_up:
    timeout in seconds without progress. refusal(round, examples): returns the reason against a
    measurement, or "" and counts the measurement.
    """

    largest_gradient: float | None = None
    give_up: float | None = None
    refusal: Callable[[int, int], str] = lambda round, examples: ""


UNLIMITED = SiteLimits()


class SplitSite:
    """A client of a run.

    Args:
        task: the task.
        identity: its keys.
        makes: returns the client's state machine, given the server's `RosterMembers`.
        model: the model, of which the client has a part.
        test: its test data; None without test data.
        hello: its first message.
        group: group for the sums of a measurement.
        folder: folder of its state; None keeps the state in memory.
        event: receives events for the log.
        limits: the limits of the site.
        device: device of the model.
    """

    def __init__(
        self,
        task: Task,
        identity: Identity,
        makes: Callable[[RosterMembers], SiteClient],
        model: nn.Module,
        test: Examples | None,
        hello: Hello,
        group: Group,
        folder: Path | None,
        event: Callable[[str, Mapping[str, object]], None],
        limits: SiteLimits = UNLIMITED,
        device: torch.device = CPU,
    ) -> None:
        self.limits = limits
        self.device = device
        self.patience = ProgressTimeout(limits.give_up)
        self.task = task
        self.identity = identity
        self.makes = makes
        self.model = model
        self.test = test
        self.hello = hello
        self.group = group
        self.folder = folder
        self.event = event
        self._working: SiteClient | None = None
        self._final: SideState | None = None
        self._round = 0
        self._written: set[int] = {-1}

    @property
    def working(self) -> SiteClient:
        if self._working is None:
            raise StateError("the server trains before it has sent the roster of clients")
        return self._working

    @property
    def machine(self) -> SplitClient:
        return self.working.machine

    @property
    def at(self) -> str:
        """Position in the run, for errors."""
        return f"round {self._round + 1}"

    def talks(self, channel: ServerChannel) -> None:
        """Process messages until the channel raises an error."""
        say(channel, self.hello, encode(self.hello))
        greeted = False
        while True:
            frame = decode(channel.next(self.patience.left if greeted else None))
            # Messages before Members are for an earlier process of this client.
            greeted = greeted or isinstance(frame, RosterMembers)
            if not greeted:
                continue
            for said in self._hears(frame, channel):
                say(channel, said, encode(said))
            if self._working is not None:
                self.patience.note(self.working.checked.accepted)
                with self._as_drawn():
                    self.machine.meanwhile()

    def _hears(self, frame: Frame, channel: ServerChannel) -> list[Frame]:
        if isinstance(frame, RosterMembers):
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
        if isinstance(frame, MeasureModel):
            return [self._measures(frame, channel)]
        if isinstance(frame, SealedHead):
            return self._takes_head(frame)
        return self._trains(SERVER, frame)

    def _takes_head(self, sealed: SealedHead) -> list[Frame]:
        """Train with the head of another client; refuse an invalid head and wait."""
        try:
            return self._trains(client(sealed.peer), self._opened(sealed))
        # The head was damaged by its sender or in transit: this client can continue.
        except HeadError as error:
            self.event("waiting", {"why": str(error)})
            return [HeadRefused(sealed.turn, str(error))]

    def _opened(self, sealed: SealedHead) -> HeadHandover:
        """Return the decrypted head.

        Raises HeadError unless the other client encrypted a head for this turn.
        """
        try:
            handed = self.identity.opens(sealed.turn, sealed.peer, sealed.content)
        except (SealError, SplitFrameError) as error:
            raise HeadError(sealed.turn, str(error)) from error
        if not isinstance(handed, HeadHandover) or handed.turn != sealed.turn:
            sender = client(sealed.peer)
            raise HeadError(
                sealed.turn, f"the sealed message of {sender} does not contain its head"
            )
        return handed

    def _trains(self, sender: str, message: Any) -> list[Frame]:
        self._tells(message)
        with self._as_drawn():
            said = self.working.node.receive(sender, values_on(message, self.device), 0.0)
        self._write_kept()
        return [self._out(envelope) for envelope in said]

    @contextmanager
    def _as_drawn(self) -> Iterator[None]:
        """Context manager: restores the random generators if reading examples uses them."""
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
        return SealedHead(message.turn, receiver, content)

    def _tells(self, message: Any) -> None:
        if isinstance(message, Turn):
            self._round = message.round
            self.event("training", {"round": message.round})

    def _check_given(self, head: SideState) -> None:
        """Raise ReceivedError for a head that the server must not send, or of another model."""
        if not self.working.checked.rules.returns:
            raise ReceivedError(
                "the server sends its own head, but it must not have heads in this run"
            )
        self.working.checked.check_head(SERVER, head)

    # Evaluation

    def _measures(self, measure: MeasureModel, channel: ServerChannel) -> ModelMeasured:
        """Return the metrics of the newest model on test data; the server computes its part."""
        if measure.head is not None:
            self._check_given(measure.head)
        if self.test is None:
            return ModelMeasured(measure.round, {})
        refusal = self.limits.refusal(measure.round, len(self.test))
        if refusal:
            self.event("left", {"why": refusal})
            return ModelMeasured(measure.round, {})
        self.event("measuring", {"round": measure.round})
        own = measure.head or self.machine.after(measure.since).own
        side = self.machine.party.side
        side.take(side.placed(own))
        read = reader_on(self.test, self.device)
        measurement = Measurement(self.task, examples=len(self.test), share=len(self.test))
        with in_mode(self.model, training=False):
            for indices in torch.split(torch.arange(len(self.test)), self.task.eval_batch_size):
                inputs, targets = read(indices)
                outputs = self._outputs(len(indices), inputs, targets, channel)
                if outputs is not None:
                    measurement.add(outputs, targets, len(indices))
        if not measurement.measured:
            return ModelMeasured(measure.round, {})
        values = measurement.values(self.group)
        finite = {f"test_{name}": one for name, one in values.items() if math.isfinite(one)}
        return ModelMeasured(measure.round, finite)

    def _outputs(self, examples: int, inputs: Any, targets: Any, channel: ServerChannel) -> Any:
        """Return the model's output for a batch; the server computes its part."""
        at_client = self.working.at_client
        assert self.test is not None
        query = at_client.query(inputs, targets, examples, len(self.test))
        say(channel, query, encode(query))
        answer = decode(channel.next(self.patience.left))
        if not isinstance(answer, QueryAnswer):
            raise StateError(
                f"the server was asked to compute, but answered {type(answer).__name__}"
            )
        return at_client.outputs(values_on(answer, self.device), inputs, examples)

    # Saved state

    def export(self) -> None:
        """Write the final head as a standalone file."""
        if self.folder is None or self._working is None:
            return
        newest = self.machine.after(max(self.machine.kept)).own
        own = self._final or newest
        tensors = dict(zip(self.working.names, [*own.weights, *own.buffers], strict=True))
        path = self.folder / f"head-{self.identity.run}.safetensors"
        write_atomically(path, weights_to_bytes(tensors))
        self.event("head", {"path": str(path)})

    def _write_kept(self) -> None:
        """Save new states, and delete states to which the server cannot return."""
        kept = self.machine.kept
        if self.folder is None or kept.keys() == self._written:
            return
        for turn in kept.keys() - self._written:
            own, memory = kept[turn]
            write_tree(self._file(turn), {"own": state_to_tree(own), "memory": memory})
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
                own = state_from_tree(found["own"])
                self.machine.party.side.check_kept(own)
                self.machine.kept[turn] = SplitClientState(own, found["memory"])
            except RunFolderError as error:
                raise StateError(str(error)) from error
            except Exception as error:
                raise StateError(f"{path} is damaged: {error}") from error
            self._written.add(turn)

    def _file(self, turn: int) -> Path:
        assert self.folder is not None
        return self.folder / f"head-{self.identity.run}-{turn}.tree"
