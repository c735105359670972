"""A party of a run over a network: frames in, frames out.

What it computes is the state machine's (`dure.split.parties.party`). Of its table it reads its own
columns alone. What it knows after the steps to which all may have to come back is in its state
folder, so that it may be killed at any moment.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.errors import RunFolderError, StateError
from dure.record.checkpoint import read_tree, write_tree
from dure.record.disk import write_atomically
from dure.record.weights import weights_to_bytes
from dure.split.alignment import AlignedParty, Blinded, Common
from dure.split.network.control import Hello, Members
from dure.split.network.frames import Frame, decode, encode
from dure.split.network.parties_control import (
    ALIGNS,
    Aligned,
    Evaluate,
    Evaluated,
    Keep,
    Kept,
    Resume,
    Resumed,
)
from dure.split.network.site import Identity, Says
from dure.split.parties.guarded import activations_guard
from dure.split.parties.messages import ActivationGradients, Step, party
from dure.split.parties.model import divide, select
from dure.split.parties.part import TrainedPart
from dure.split.parties.party import Party
from dure.split.parties.plan import PartiesPlan, ids_of
from dure.split.parties.table import Table
from dure.tasks.batch_norm import needs_two
from dure.tasks.modes import in_mode

Event = Callable[[str, Mapping[str, object]], None]


class PartySite:
    """A party at work.

    client: its number among those who join. train, test: tables of all columns, of which it reads
    its own. folder: where it keeps what it knew; None keeps it in memory. event: hears of what
    happens.

    Raises ValueError for a task that the plan does not fit.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        train: Examples,
        test: Examples | None,
        plan: PartiesPlan,
        client: int,
        seed: int,
        folder: Path | None,
        run: str,
        event: Event,
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.train = train
        self.test = test
        self.folder = folder
        self.run = run
        self.event = event
        inputs, _ = train.batch(torch.tensor([0]))
        division = divide(model, inputs, plan.features, plan.parties)
        self.number = plan.others(len(division.heads))[client]
        self.name = party(self.number)
        self.columns = division.features[self.number]
        head = division.heads[self.number]
        self.part = TrainedPart(head, model, task.optimizer, task.lr_schedule)
        self.known = torch.arange(len(train))
        """The rows of the people whom this party knows."""
        self.ids: list[Any] = []
        if plan.align:
            self.known = plan.known(self.number, len(train), seed)
            ids = ids_of(task.train, plan.id_column)
            self.ids = [ids[row] for row in self.known.tolist()]
        self._joins = plan.align and needs_two(model, train)
        self._kept: dict[int, dict[str, Any]] = {0: {"part": self.part.kept(), "memory": None}}
        """What it knew after some steps, by their number."""
        self._aligning: AlignedParty | None = None
        self._rows: Tensor | None = None if plan.align else self.known
        self._party: Party | None = None
        self._resumed = False
        """Whether the server has said on this channel where to begin."""
        self._read_kept()

    def takes(self, hello: Hello, identity: Identity) -> None:
        """As whom it comes to the server."""
        self.hello = hello
        self.identity = identity

    @property
    def at(self) -> str:
        """What it is at, for errors."""
        return "the start" if self._party is None else f"step {self._party.done + 1}"

    def talks(self, channel: Says) -> None:
        """Until the channel ends, by the error that it raises."""
        self._resumed = False
        channel.say(encode(self.hello))
        while True:
            for said in self._hears(decode(channel.next())):
                channel.say(encode(said))

    def _hears(self, frame: Frame) -> list[Any]:
        if isinstance(frame, Members):
            roster = self.identity.takes(frame.roster)
            self.event("roster", {"clients": len(roster.members), "is": roster.fingerprint})
            return []
        if isinstance(frame, Resume):
            self._resume(frame.step)
            self._resumed = True
            return [Resumed(frame.turn)]
        # It was meant for the process that was here before, of whose end nobody knew yet.
        if not self._resumed:
            return []
        if isinstance(frame, Keep):
            self._keep(frame)
            return [Kept(frame.step)]
        if isinstance(frame, Evaluate):
            return [Evaluated(frame.first, self._measured(frame))]
        if isinstance(frame, Blinded | Common) and self._aligning is not None:
            return self._aligns(self._aligning, frame)
        if isinstance(frame, Step | ActivationGradients) and self._party is not None:
            return self._trains(self._party, frame)
        raise StateError(f"the server says {type(frame).__name__}, which is not due")

    def _trains(self, own: Party, message: Step | ActivationGradients) -> list[Any]:
        if isinstance(message, Step) and message.number % own.batches.steps_per_epoch == 0:
            self.event("training", {"round": message.number // own.batches.steps_per_epoch})
        return [said for _, said in own.receive(self.plan.holder, message, 0.0)]

    @torch.no_grad()
    def _measured(self, asked: Evaluate) -> Tensor:
        """What leaves the head for rows of the test data, in evaluation."""
        until = asked.first + asked.count
        if self.test is None or not 0 <= asked.first < until <= len(self.test):
            has = "none" if self.test is None else f"{len(self.test)}"
            raise StateError(
                f"the model is measured on rows {asked.first} to {until} of the test data, of "
                f"which {self.name} has {has}: all need their columns of the same people"
            )
        inputs, _ = self.test.batch(torch.arange(asked.first, until))
        with in_mode(self.part.module, training=False):
            values: Tensor = self.part.module(select(inputs, self.columns))
        return values.contiguous()

    # Alignment

    def _aligns(self, aligning: AlignedParty, message: Blinded | Common) -> list[Any]:
        said = aligning.receive(self.plan.holder, message, 0.0)
        if aligning.rows is not None:
            self._rows = self.known[torch.tensor(aligning.rows)]
            self._write(self._people, {"rows": self._rows})
            self.event("aligned", {"people": len(self._rows)})
            return [Aligned()]
        return [one for _, one in said]

    # Going back, and what it knew

    def _resume(self, step: int) -> None:
        if step == ALIGNS:
            # The secret is nobody else's, and a new one each time.
            secret = secrets.token_bytes(32)
            self._aligning = AlignedParty(self.name, self.plan.holder, self.ids, secret)
            self._rows = self._party = None
            return
        if self._rows is None or step not in self._kept:
            what = "with whom it was aligned" if self._rows is None else "what it knew"
            raise StateError(
                f"{self.name} does not have {what} after step {step} any more: go on with the "
                f"--state folder that it had"
            )
        if self._party is None:
            self._party = self._made(self._rows)
        kept = self._kept[step]
        self.part.back(kept["part"])
        if self._party.guard is not None and kept["memory"] is not None:
            self._party.guard.memory = copy.deepcopy(kept["memory"])
        self._party.drop()
        self._party.done = step

    def _made(self, rows: Tensor) -> Party:
        return Party(
            self.number,
            self.plan.holder,
            self.part,
            Table(self.train, rows, self.seed).reader(self.columns),
            Batches(len(rows), self.plan.batch_size, self.seed, joins=self._joins),
            self.seed,
            lambda examples, back: 0.0,
            activations_guard(self.plan.defence, self.number, self.plan.label_party, self.seed),
        )

    def _keep(self, asked: Keep) -> None:
        own = self._party
        if own is None or own.done != asked.step:
            raise StateError(f"{self.name} is to keep step {asked.step}, which it is not in")
        memory = None if own.guard is None else copy.deepcopy(own.guard.memory)
        tree = {"part": self.part.kept(), "memory": memory}
        self._write(self._file(asked.step), tree)
        self._kept[asked.step] = tree
        for step in self._kept.keys() - {asked.step, asked.since}:
            del self._kept[step]
            if self.folder is not None:
                (self.folder / self._file(step)).unlink(missing_ok=True)

    def export(self) -> None:
        """Writes the head that it has in the end, for use alone, by the names of its own module."""
        if self.folder is not None and self._party is not None:
            path = self.folder / f"head-{self.run}.safetensors"
            tensors = {name: one.detach() for name, one in self.part.module.state_dict().items()}
            write_atomically(path, weights_to_bytes(tensors))
            self.event("head", {"path": str(path)})

    def _read_kept(self) -> None:
        if self.folder is None:
            return
        for path in sorted(self.folder.glob(self._file("*"))):
            self._kept[int(path.stem.rpartition("-")[2])] = _read(path)
        if self.plan.align and (self.folder / self._people).exists():
            self._rows = _read(self.folder / self._people)["rows"]

    def _write(self, name: str, tree: dict[str, Any]) -> None:
        if self.folder is not None:
            write_tree(self.folder / name, tree)

    @property
    def _people(self) -> str:
        return f"people-{self.run}.tree"

    def _file(self, step: int | str) -> str:
        return f"head-{self.run}-{step}.tree"


def _read(path: Path) -> dict[str, Any]:
    """Raises StateError for a file that is damaged."""
    try:
        return read_tree(path)
    except RunFolderError as error:
        raise StateError(str(error)) from error
