"""Learner of the holder of the labels in vertical split learning over a network.

The holder is the server; if a party has the labels, this process is that party, with its columns
too. The other parties connect to it. The state machines are those of the simulation.

Whenever this run writes a checkpoint, the parties save their state after the same step: a server or
a party that is killed continues from there, with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import Learner, StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.data.batches import Batches
from dure.data.examples import reader_on
from dure.errors import DureError, RunFolderError
from dure.machine.threads import threads_for
from dure.protocol.channels import Channels, HostedRun
from dure.randomness.seeds import generator
from dure.record.checkpoint import read_tree, write_tree
from dure.record.meter import Meter
from dure.split.alignment import AlignedHolder
from dure.split.blame import check_bounded
from dure.split.compute_queue import ComputeQueue
from dure.split.leakage.randomised_response import relabelled
from dure.split.messages import SERVER
from dure.split.network import sizes
from dure.split.network.admission import Admission
from dure.split.network.control import ALIGNS, Aligned, Evaluate, Evaluated, SaveState
from dure.split.network.vertical_split_server import VerticalSplitServer
from dure.split.parties.aligned_examples import AlignedExamples
from dure.split.parties.facts import facts_of
from dure.split.parties.guarded import GuardedGradients
from dure.split.parties.label_holder import LabelHolder, LabelParty
from dure.split.parties.messages import ActivationForm, party
from dure.split.parties.model import VerticalPart, activations_of, divide, joined, select
from dure.split.parties.part import TrainedPart
from dure.split.parties.party import Party
from dure.split.parties.plan import VerticalPlan, ids_of
from dure.split.placement import model_on, needs_doubles
from dure.tasks.batch_norm import needs_two
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode
from dure.tasks.task_summary import trains_of
from dure.tensors.buffers import non_persistent_buffers_of

PEOPLE = "people.tree"
"""File in the run folder: the rows of the people whom all parties know."""

ASKED = "asked.json"
"""File in the run folder: digests of the lists of ids that were answered."""

SECRET = "align.pem"
"""File in the run folder, until all have aligned: the secret of this side."""


def zero_seconds(examples: int, back: bool) -> float:
    """Return 0: over a network, computation takes real time."""
    return 0.0


class AlignmentWork:
    """The alignment, one step of `VerticalSplitServer`. make: returns a new `AlignedHolder`."""

    def __init__(self, make: Callable[[], AlignedHolder]) -> None:
        self._make = make
        self.holder = make()
        self._aligned: set[str] = set()
        """Parties that have saved the alignment."""

    @property
    def done(self) -> int:
        return int(self._aligned == set(self.holder.parties))

    @property
    def waits_for(self) -> Sequence[str]:
        return self.holder.awaited or sorted(set(self.holder.parties) - self._aligned)

    def back(self) -> int:
        self.holder = self._make()
        self._aligned.clear()
        return ALIGNS

    def begin(self) -> list[tuple[str, Any]]:
        return list(self.holder.begin(0.0))

    def receive(self, sender: str, message: Any) -> list[tuple[str, Any]]:
        if isinstance(message, Aligned):
            if self.holder.rows is None or sender in self._aligned:
                raise ValueError("it reports that it is aligned, which is not expected")
            self._aligned.add(sender)
            return []
        return list(self.holder.receive(sender, message, 0.0))


class TrainingWork:
    """The steps of training.

    first: the holder, or the party that is the holder too.
    """

    def __init__(self, first: LabelHolder | LabelParty, guarded: GuardedGradients) -> None:
        self.first = first
        self.holder = first.holder if isinstance(first, LabelParty) else first
        self.guarded = guarded
        self.parts = {"tail": self.holder.part}
        if isinstance(first, LabelParty):
            self.parts["head"] = first.party.part
        self.kept = self.now()
        """State after the newest step that all have saved."""

    @property
    def done(self) -> int:
        return self.holder.done

    @property
    def waits_for(self) -> Sequence[str]:
        return self.holder.awaited

    def now(self) -> dict[str, Any]:
        """Return the current state, as a tree."""
        return {
            "step": self.done,
            "parts": {name: part.kept() for name, part in self.parts.items()},
            "remembered": copy.deepcopy(self.guarded.memory),
        }

    def back(self) -> int:
        for name, part in self.parts.items():
            part.back(self.kept["parts"][name])
        self.guarded.remember(copy.deepcopy(self.kept["remembered"]))
        self.holder.drop()
        self.holder.done = step = self.kept["step"]
        if isinstance(self.first, LabelParty):
            self.first.party.drop()
            self.first.party.done = step
        return int(step)

    def begin(self) -> list[tuple[str, Any]]:
        return list(self.first.begin(0.0))

    def receive(self, sender: str, message: Any) -> list[tuple[str, Any]]:
        return list(self.first.receive(sender, message, 0.0))


class ServedVerticalLearner(Learner):
    """Learner of the holder of the labels.

    Args:
        task: the task.
        place: model, group and folder of this process.
        seed: the run's seed.
        plan: the plan of the run.
        connect: opens the channels to the parties.
    """

    def __init__(
        self,
        task: Task,
        context: RankContext,
        seed: int,
        plan: VerticalPlan,
        connect: Callable[[HostedRun], Channels],
    ) -> None:
        self.device = context.device
        task = task.on(self.device)
        self.task = task
        self.plan = plan
        self.seed = seed
        self.context = context
        self.where = plan.holder
        doubles = needs_doubles(plan.defence, averages=False)
        self.model = model_on(context.model(task, seed), self.device, doubles)
        self.train, self.test = examples_for(task)
        inputs, _ = reader_on(self.train, self.device)(torch.tensor([0]))
        self.division = divide(self.model, inputs, plan.features, plan.parties)
        self.activations = activations_of(self.division, inputs)
        self.parties = len(self.division.heads)
        self.others = plan.others(self.parties)
        if not self.others:
            raise DureError(
                f"{plan.holder} has all columns and the labels: other parties are not needed"
            )
        size = len(self.train) if plan.batch_size is None else plan.batch_size
        self.flops = flops_per_step(self.model, self.train, min(size, len(self.train)))
        self.channels = connect(
            HostedRun(
                clients=len(self.others),
                seed=seed,
                trains=trains_of(task, self.model),
                threads=threads_for(self.flops),
            )
        )
        names = [party(number) for number in self.others]
        self._meters = [Meter(plan.holder, is_worker=plan.holder != SERVER)]
        self._meters += [Meter(name) for name in names]
        entrance = Admission(self.channels, len(names), self._tells)
        entrance.wait(context.interrupted)
        each = max(one.nbytes for one in self.activations) / len(inputs)
        examples = max(size, task.eval_batch_size)
        self.channels.allow(sizes.largest_message(sizes.SLACK * each * examples, 0))
        self.hall = VerticalSplitServer(
            self.channels,
            entrance,
            self.others,
            (self._meters[0], dict(zip(names, self._meters[1:], strict=True))),
            self._tells,
            lambda look: context.report({"federation": look}),
            context.interrupted,
            self.device,
        )
        rows = self._aligned(entrance) if plan.align else self._all_rows(entrance)
        self.examples = len(rows)
        joins = plan.align and needs_two(self.model, self.train)
        self.batches = Batches(len(rows), plan.batch_size, seed, joins=joins)
        self.units_per_epoch = self.batches.steps_per_epoch
        self.training = self._training(rows)
        self.elsewhere = self._elsewhere()
        self.step = 0
        self._durable = 0
        """Step of the newest checkpoint."""
        self._began = False
        self._over = False

    def _tells(self, text: str) -> None:
        self.context.report({"waiting": text})

    # Alignment and parts

    def _all_rows(self, entrance: Admission) -> Tensor:
        """Return the rows of all people.

        Raises PartyLostError for a party with another number of people.
        """
        for place, number in enumerate(self.others):
            examples = entrance.hellos[place].examples
            if examples != len(self.train):
                self.hall.refuses(
                    party(number),
                    f"it has {examples} people, but {self.plan.holder} has {len(self.train)}: "
                    "give all the same people in the same order, or align",
                )
        return torch.arange(len(self.train))

    def _aligned(self, entrance: Admission) -> Tensor:
        """Return the rows of the people whom all know, in the common order."""
        folder = self.context.folder
        if folder is not None and (folder / PEOPLE).exists():
            kept: Tensor = read_tree(folder / PEOPLE)["rows"]
            return kept
        plan = self.plan
        first = self.parties if plan.label_party is None else plan.label_party
        known = plan.known(first, len(self.train), self.seed)
        ids = ids_of(self.task.train, plan.id_column)
        own = [ids[row] for row in known.tolist()]
        # Imported here because it loads the library of the elliptic curve.
        from dure.split.network.alignment_queries import AlignmentQueries, secret_in

        secret_file = None if folder is None else folder / SECRET
        secret = secret_in(secret_file)
        queries = AlignmentQueries(None if folder is None else folder / ASKED)
        sizes = {
            name: entrance.hellos[place].examples for place, name in enumerate(self.hall.names)
        }

        def holder() -> AlignedHolder:
            return AlignedHolder(
                plan.holder,
                self.hall.names,
                own,
                secret,
                # The order covers only ids that all parties know, so it need not be secret.
                order=plan.secret(first, self.seed),
                limits=sizes,
                asks=queries.ask,
            )

        self._tells("aligning: finding the people whom all parties have")
        aligning = AlignmentWork(holder)
        self.hall.does(aligning)
        self.hall.reach(1)
        rows = known[torch.tensor(aligning.holder.rows)]
        # All parties have saved the alignment by now, so the secret can be deleted afterwards.
        if folder is not None:
            write_tree(folder / PEOPLE, {"rows": rows})
        if secret_file is not None:
            secret_file.unlink(missing_ok=True)
        return rows

    def _training(self, rows: Tensor) -> TrainingWork:
        plan = self.plan
        seed = self.seed
        names = [party(number) for number in range(self.parties)]
        others = self.hall.names
        # Derived from the private key: a party that knew the seed could subtract the noise.
        drawn = self.channels.key.seed(f"defences of {self.channels.run}")
        labelled = relabelled(plan.defence, self.train, drawn)
        table = AlignedExamples(labelled, rows, seed, self.device)
        guarded = GuardedGradients(
            plan.defence,
            others,
            self.division.join,
            lambda name, step: generator(drawn, "defence", others.index(name), step),
        )
        holder = LabelHolder(
            plan.holder,
            {
                name: ActivationForm(tuple(one.shape[1:]), one.dtype)
                for name, one in zip(names, self.activations, strict=True)
            },
            self._trained(self.division.tail),
            self.division.join,
            table.targets,
            self.batches,
            CountedLoss(self.task.loss, labelled),
            seed,
            zero_seconds,
            ComputeQueue(),
            guarded,
        )
        if plan.label_party is None:
            return TrainingWork(holder, guarded)
        own = Party(
            plan.label_party,
            plan.holder,
            self._trained(self.division.heads[plan.label_party]),
            table.reader(self.division.features[plan.label_party]),
            self.batches,
            seed,
            zero_seconds,
        )
        own.busy = holder.busy
        return TrainingWork(LabelParty(own, holder), guarded)

    def _trained(self, part: VerticalPart) -> TrainedPart:
        return TrainedPart(part, self.model, self.task.optimizer, self.task.lr_schedule)

    def _elsewhere(self) -> list[str]:
        """Return the names of the model's weights and buffers that other parties have."""
        heads = [self.division.heads[number] for number in self.others]
        theirs = {id(piece.there) for head in heads for piece in head.pieces}
        theirs |= {id(buffer) for head in heads for buffer in head.module.buffers()}
        state = self.model.state_dict(keep_vars=True)
        return [name for name, value in state.items() if id(value) in theirs]

    # The run

    def flops_per_step(self) -> float:
        return self.flops

    def _take_up(self) -> None:
        """Send the parties back to the state of the newest checkpoint, on the first call."""
        if not self._began:
            self._began = True
            self.hall.does(self.training)

    def advance(self, control_flags: int) -> StepResult:
        """Run a step of all parties on a batch of the people whom all know."""
        self._take_up()
        self.hall.reach(self.step + 1)
        samples = len(self.batches.at(self.step))
        self.step += 1
        loss, counted = self.training.holder.loss
        return StepResult(
            loss=loss if counted else None, samples=samples, control_flags=control_flags
        )

    def ended(self, reason: str) -> None:
        self._over = True
        if reason != "interrupt":
            self.channels.over("the run is over")

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the test data, of which each party has its columns."""
        if self.test is None:
            return {}
        self._take_up()
        self.hall.reach(self.step)
        tail = self.training.holder.part.module
        count = len(self.test)
        measurement = Measurement(self.task, examples=count, share=count)
        with in_mode(tail, training=False):
            for rows in torch.split(torch.arange(count), self.task.eval_batch_size):
                values = self._test_activations(rows)
                _, targets = reader_on(self.test, self.device)(rows)
                outputs = tail(joined(values, self.division.join))
                measurement.add(outputs, targets, len(rows))
        values_of = measurement.values(self.context.group)
        return {f"test_{name}": value for name, value in values_of.items()}

    def _test_activations(self, rows: Tensor) -> list[Tensor]:
        """Return the output of all heads for these rows of the test data, in party order."""
        assert self.test is not None
        answers = self.hall.ask(Evaluate(int(rows[0]), len(rows)), self._check_evaluated)
        found: list[Tensor] = []
        for number in range(self.parties):
            if number == self.plan.label_party:
                inputs, _ = reader_on(self.test, self.device)(rows)
                head = self.division.heads[number].module
                with in_mode(head, training=False):
                    found.append(head(select(inputs, self.division.features[number])))
                continue
            found.append(answers[party(number)].values)
        return found

    def _check_evaluated(self, name: str, asked: Evaluate, answer: Evaluated) -> None:
        """Raise ValueError for activations of test data that cannot be joined."""
        values = answer.values
        like = self.activations[int(name.removeprefix("party "))]
        wanted = (asked.count, *like.shape[1:])
        if tuple(values.shape) != wanted or values.dtype != like.dtype:
            raise ValueError(
                f"activations of test data of shape {list(values.shape)} and {values.dtype}, but "
                f"{asked.count} people need {list(wanted)} and {like.dtype}"
            )
        check_bounded("activations of test data", [values])

    # Checkpoints

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the tail, and of this process's head if it has one."""
        self.division.store()
        state = self.model.state_dict()
        return {name: value for name, value in state.items() if name not in self.elsewhere}

    def state(self) -> dict[str, Any]:
        if not self._over:
            self._all_keep()
        return {
            "version": 1,
            "served": True,
            **self.training.now(),
            "people": self.examples,
            "buffers": non_persistent_buffers_of(self.model),
        }

    def _all_keep(self) -> None:
        """Save the current state at all parties."""
        self._take_up()
        self.hall.reach(self.step)
        if self.training.kept["step"] != self.step:
            self.hall.ask(SaveState(self.step, self._durable))
            self.training.kept = self.training.now()

    def saved(self) -> None:
        self._durable = self.step

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        if not state.get("served"):
            raise RunFolderError(
                "this run was simulated, so no remote party has its head: serve a new run"
            )
        if state["people"] != self.examples:
            raise RunFolderError(
                f"there are {self.examples} people, but there were {state['people']} when the run "
                "started: use the same data"
            )
        self.training.kept = {name: state[name] for name in ("step", "parts", "remembered")}
        self.step = self._durable = state["step"]
        self.training.back()

    def meters(self) -> list[Meter]:
        return self._meters

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run: parts of the model, people, and who could learn labels."""
        return facts_of(
            self.plan,
            self.division,
            self.activations,
            self.batches,
            self.batches.n,
            len(self.plan.known(0, len(self.train), self.seed)),
            {},
        )
