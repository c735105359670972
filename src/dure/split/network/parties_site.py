"""A party of a run over a network: frames in, frames out.

The state machine is `dure.split.parties.party`. The party reads only its own columns of its table.
Its state folder has its state after the steps to which all may have to return, so that the process
may be killed at any moment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.data.examples import Examples, reader_on
from dure.errors import PolicyError, RunFolderError, StateError
from dure.machine.devices import CPU
from dure.record.checkpoint import read_tree, write_tree
from dure.record.disk import write_atomically
from dure.record.weights import weights_to_bytes
from dure.split.alignment import AlignedParty, Blinded, Common
from dure.split.gradient_bound import GradientBound
from dure.split.network import sizes
from dure.split.network.control import (
    ALIGNS,
    Aligned,
    Evaluate,
    Evaluated,
    Hello,
    Resume,
    Resumed,
    RosterMembers,
    SaveState,
    StateSaved,
)
from dure.split.network.frames import Frame, decode, encode, values_on
from dure.split.network.incoming import ProgressTimeout
from dure.split.network.outgoing import ServerChannel, say
from dure.split.network.site import UNLIMITED, Identity, SiteLimits
from dure.split.parties.aligned_examples import AlignedExamples
from dure.split.parties.guarded import activations_guard
from dure.split.parties.messages import ActivationGradients, BeginStep, party
from dure.split.parties.model import activations_of, divide, select
from dure.split.parties.part import TrainedPart
from dure.split.parties.party import Party
from dure.split.parties.plan import VerticalPlan, ids_of
from dure.tasks.batch_norm import needs_two
from dure.tasks.modes import in_mode

if TYPE_CHECKING:
    from dure.split.network.alignment_queries import AlignmentQueries

Event = Callable[[str, Mapping[str, object]], None]


class PartySite:
    """A party over a network.

    Args:
        task: the task.
        model: the model, of which the party trains its head.
        train: table of all columns, of which the party reads its own.
        test: likewise, of the test data; None without test data.
        plan: the plan of the run.
        client: number of the party among the parties that connect.
        seed: the run's seed.
        folder: folder of its state; None keeps the state in memory.
        run: identifier of the run.
        event: receives events for the log.
        device: device of the model.

    Raises:
        ValueError: the plan does not fit the task.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        train: Examples,
        test: Examples | None,
        plan: VerticalPlan,
        client: int,
        seed: int,
        folder: Path | None,
        run: str,
        event: Event,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.plan = plan
        self.seed = seed
        self.train = train
        self.test = test
        self.folder = folder
        self.run = run
        self.event = event
        inputs, _ = reader_on(train, device)(torch.tensor([0]))
        division = divide(model, inputs, plan.features, plan.parties)
        self.number = plan.others(len(division.heads))[client]
        self.name = party(self.number)
        self.columns = division.features[self.number]
        own = activations_of(division, inputs)[self.number]
        batch = len(train) if plan.batch_size is None else plan.batch_size
        # The largest messages are the gradients of a batch, or the positions of all people.
        crossing = sizes.SLACK * own.nbytes * batch + 8 * len(train)
        self.most = sizes.largest_message(crossing, 0)
        """Maximum bytes of a message of the holder."""
        head = division.heads[self.number]
        self.part = TrainedPart(head, model, task.optimizer, task.lr_schedule)
        self.known = torch.arange(len(train))
        """Rows of the people whom this party knows."""
        self.ids: list[Any] = []
        if plan.align:
            self.known = plan.known(self.number, len(train), seed)
            ids = ids_of(task.train, plan.id_column)
            self.ids = [ids[row] for row in self.known.tolist()]
        self._joins = plan.align and needs_two(model, train)
        self._kept: dict[int, dict[str, Any]] = {0: {"part": self.part.kept(), "memory": None}}
        """State after some steps, by step."""
        self._aligning: AlignedParty | None = None
        self._queries: AlignmentQueries | None = None
        self._secret: bytes | None = None
        self._rows: Tensor | None = None if plan.align else self.known
        self._party: Party | None = None
        self._resumed = False
        """Whether the server has sent the step to begin with on this channel."""
        self._accepted = 0
        """Number of messages with progress in training or alignment."""
        self._measuring = (0, 0)
        """Number of measurements so far, and the next row of the newest measurement."""
        self.limits = UNLIMITED
        self.patience = ProgressTimeout(None)
        self._read_kept()

    def takes(self, hello: Hello, identity: Identity, limits: SiteLimits = UNLIMITED) -> None:
        """Set the first message and the identity. limits: the limits of the site."""
        self.hello = hello
        self.identity = identity
        self.limits = limits
        self.patience = ProgressTimeout(limits.give_up)

    @property
    def at(self) -> str:
        """Position in the run, for errors."""
        return "the start" if self._party is None else f"step {self._party.done + 1}"

    def talks(self, channel: ServerChannel) -> None:
        """Process messages until the channel raises an error."""
        self._resumed = False
        say(channel, self.hello, encode(self.hello))
        while True:
            frame = decode(channel.next(self.patience.left))
            if isinstance(frame, RosterMembers):
                channel.allow(self.most)
            for said in self._hears(frame):
                say(channel, said, encode(said))
            if self._resumed:
                self.patience.note(self._accepted)

    def _hears(self, frame: Frame) -> list[Any]:
        if isinstance(frame, RosterMembers):
            roster = self.identity.takes(frame.roster)
            self.event("roster", {"clients": len(roster.members), "is": roster.fingerprint})
            return []
        if isinstance(frame, Resume):
            self._resume(frame.step)
            self._resumed = True
            return [Resumed(frame.turn)]
        # Meant for an earlier process of this party, before the server noticed its end.
        if not self._resumed:
            return []
        if isinstance(frame, SaveState):
            self._keep(frame)
            self._accepted += 1
            return [StateSaved(frame.step)]
        if isinstance(frame, Evaluate):
            return [Evaluated(frame.first, self._measured(frame))]
        if isinstance(frame, Blinded | Common) and self._aligning is not None:
            return self._aligns(self._aligning, frame)
        if isinstance(frame, BeginStep | ActivationGradients) and self._party is not None:
            return self._trains(self._party, values_on(frame, self.device))
        raise StateError(f"the server sends {type(frame).__name__}, which is not expected")

    def _trains(self, own: Party, message: BeginStep | ActivationGradients) -> list[Any]:
        self._accepted += 1
        if isinstance(message, BeginStep) and message.number % own.batches.steps_per_epoch == 0:
            self.event("training", {"round": message.number // own.batches.steps_per_epoch})
        return [said for _, said in own.receive(self.plan.holder, message, 0.0)]

    @torch.no_grad()
    def _measured(self, asked: Evaluate) -> Tensor:
        """Return the head's output for rows of the test data, in evaluation."""
        until = asked.first + asked.count
        if self.test is None or not 0 <= asked.first < until <= len(self.test):
            has = "none" if self.test is None else f"{len(self.test)}"
            raise StateError(
                f"the model is evaluated on rows {asked.first} to {until} of the test data, but "
                f"{self.name} has {has} rows: all parties need their columns of the same people"
            )
        self._check_measurement(asked.first, until)
        inputs, _ = reader_on(self.test, self.device)(torch.arange(asked.first, until))
        with in_mode(self.part.module, training=False):
            values: Tensor = self.part.module(select(inputs, self.columns))
        return values.contiguous()

    def _check_measurement(self, first: int, until: int) -> None:
        """Raise PolicyError for a measurement that the site's policy refuses.

        Rows that do not continue the newest measurement begin another measurement.
        """
        assert self.test is not None
        begun, expected = self._measuring
        if first == 0 or first != expected:
            begun += 1
            done = 0 if self._party is None else self._party.done
            epoch = 0 if self._party is None else done // self._party.batches.steps_per_epoch
            refusal = self.limits.refusal(epoch, len(self.test))
            if refusal:
                raise PolicyError(f"{self.name} does not evaluate the model: {refusal}")
        self._measuring = begun, until

    # Alignment

    def _aligns(self, aligning: AlignedParty, message: Blinded | Common) -> list[Any]:
        said = aligning.receive(self.plan.holder, message, 0.0)
        self._accepted += 1
        if aligning.rows is not None:
            self._rows = self.known[torch.tensor(aligning.rows)]
            self._write(self._people, {"rows": self._rows})
            self.event("aligned", {"people": len(self._rows)})
            return [Aligned()]
        return [one for _, one in said]

    # Rollback and saved state

    def _resume(self, step: int) -> None:
        if step == ALIGNS:
            self._aligning = self._begins_to_align()
            self._rows = self._party = None
            return
        if self._rows is None or step not in self._kept:
            what = "with whom it was aligned" if self._rows is None else "what it knew"
            raise StateError(
                f"{self.name} no longer has {what} after step {step}: use its former --state folder"
            )
        if self._party is None:
            self._party = self._made(self._rows)
        self._forgets_secret()
        kept = self._kept[step]
        self.part.back(kept["part"])
        if self._party.guard is not None and kept["memory"] is not None:
            self._party.guard.memory = copy.deepcopy(kept["memory"])
        self._party.drop()
        self._party.done = step

    def _begins_to_align(self) -> AlignedParty:
        """Return a new alignment with the run's secret, so that a restart sends the same points."""
        # Imported here because it loads the library of the elliptic curve.
        from dure.split.network.alignment_queries import AlignmentQueries, secret_in

        if self._queries is None:
            self._queries = AlignmentQueries(self._in_folder(f"asked-{self.run}.json"))
        if self._secret is None:
            self._secret = secret_in(self._in_folder(self._key))
        return AlignedParty(
            self.name, self.plan.holder, self.ids, self._secret, asks=self._queries.ask
        )

    def _forgets_secret(self) -> None:
        """Delete the secret after the alignment, so that it cannot leak later."""
        self._secret = None
        if self.plan.align and self.folder is not None:
            (self.folder / self._key).unlink(missing_ok=True)

    def _in_folder(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name

    def _made(self, rows: Tensor) -> Party:
        batches = Batches(len(rows), self.plan.batch_size, self.seed, joins=self._joins)
        own = Party(
            self.number,
            self.plan.holder,
            self.part,
            AlignedExamples(self.train, rows, self.seed, self.device).reader(self.columns),
            batches,
            self.seed,
            lambda examples, back: 0.0,
            activations_guard(self.plan.defence, self.number, self.plan.label_party, self.seed),
        )
        own.bound = GradientBound(self.limits.largest_gradient, batches.steps_per_epoch)
        return own

    def _keep(self, asked: SaveState) -> None:
        own = self._party
        if own is None or own.done != asked.step:
            raise StateError(f"{self.name} has to save step {asked.step}, but is in another step")
        memory = None if own.guard is None else copy.deepcopy(own.guard.memory)
        tree = {"part": self.part.kept(), "memory": memory}
        self._write(self._file(asked.step), tree)
        self._kept[asked.step] = tree
        for step in self._kept.keys() - {asked.step, asked.since}:
            del self._kept[step]
            if self.folder is not None:
                (self.folder / self._file(step)).unlink(missing_ok=True)

    def export(self) -> None:
        """Write the final head as a standalone file, with the names of its own module."""
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
    def _key(self) -> str:
        return f"align-{self.run}.pem"

    @property
    def _people(self) -> str:
        return f"people-{self.run}.tree"

    def _file(self, step: int | str) -> str:
        return f"head-{self.run}-{step}.tree"


def _read(path: Path) -> dict[str, Any]:
    """Return the tree of a file. Raises StateError for a damaged file."""
    try:
        return read_tree(path)
    except RunFolderError as error:
        raise StateError(str(error)) from error
