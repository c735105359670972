"""Learner that simulates vertical split learning under a virtual clock.

The holder of the labels and the parties are state machines without I/O. Their computation is real;
only the time is virtual. A device that trains n examples of the whole model in a second takes, for
a part with the share s of the model's operations,

    s / 3 · examples / n     forward            2 s / 3 · examples / n     backward

The server computes by the same formula with its own speed. The computation of an alignment takes no
time; its messages do. Each party has its own part of the model, its own columns, and its own
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import Learner, StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.data.batches import Batches
from dure.data.examples import Examples, reader_on
from dure.fleet.devices import BYTES_PER_MBIT
from dure.fleet.virtual_network import Node, NodeLink, VirtualNetwork
from dure.machine.devices import to_cpu
from dure.protocol.server_context import conditions_in
from dure.randomness.seeds import generator
from dure.record.meter import Meter
from dure.split.alignment import AlignedHolder, AlignedParty
from dure.split.compute_queue import ComputeQueue
from dure.split.leakage.defence import class_labels, count_classes
from dure.split.leakage.randomised_response import relabelled
from dure.split.messages import SERVER
from dure.split.parties.aligned_examples import AlignedExamples
from dure.split.parties.facts import facts_of
from dure.split.parties.guarded import GuardedGradients, activations_guard
from dure.split.parties.label_holder import LabelHolder, LabelParty
from dure.split.parties.messages import ActivationForm, party
from dure.split.parties.metered import MeteredHolder, PartyMeters
from dure.split.parties.model import (
    JoinedParts,
    VerticalDivision,
    VerticalPart,
    activations_of,
    divide,
    joined,
    select,
)
from dure.split.parties.part import TrainedPart
from dure.split.parties.party import Party
from dure.split.parties.plan import VerticalPlan, ids_of
from dure.split.placement import model_on, needs_doubles
from dure.tasks.batch_norm import needs_two
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.buffers import (
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)


class SimulatedVerticalLearner(Learner):
    """The holder of the labels and all parties of a run, in one process."""

    def __init__(self, task: Task, context: RankContext, seed: int, plan: VerticalPlan) -> None:
        self.device = context.device
        task = task.on(self.device)
        self.task = task
        self.plan = plan
        self.seed = seed
        self.where = plan.holder
        self.group = context.group
        self.conditions = conditions_in(context)
        doubles = needs_doubles(plan.defence, averages=False)
        self.model = model_on(context.model(task, seed), self.device, doubles)
        self.train, self.test = examples_for(task)
        inputs, _ = reader_on(self.train, self.device)(torch.tensor([0]))
        self.division = divide(self.model, inputs, plan.features, plan.parties)
        self.parties = len(self.division.heads)
        names = [party(number) for number in range(self.parties)]
        self.others = [party(number) for number in plan.others(self.parties)]
        """Names of the parties without labels."""
        self.meters_ = [Meter(SERVER, is_worker=False)] if plan.label_party is None else []
        self.meters_ += [Meter(name) for name in names]
        # The holder's meter is first, because the holder records the facts.
        self.meters_.sort(key=lambda meter: meter.name != plan.holder)
        self.network = VirtualNetwork()
        self.rows = {n: torch.arange(len(self.train)) for n in range(self.parties + 1)}
        """Rows of the people whom all know, by party; for the server at the number of parties."""
        if plan.align:
            self._align()
        people = self.rows[0].numel()
        self.examples = people
        # The number of common people is known only now. A last single example joins another batch.
        joins = plan.align and needs_two(self.model, self.train)
        self.batches = Batches(people, plan.batch_size, seed, joins=joins)
        self.units_per_epoch = self.batches.steps_per_epoch
        self.flops = flops_per_step(self.model, self.train, self.batches.batch_size)
        self.activations = activations_of(self.division, inputs)
        shares = _shares(self.division, inputs, self.activations)
        self.step = 0
        self.tail = self._trained(self.division.tail)
        self.heads = [self._trained(head) for head in self.division.heads]
        busy = ComputeQueue()
        # The labels of the training, which the defence may have changed.
        self.labelled = relabelled(plan.defence, self.train, seed)
        self.guarded = GuardedGradients(plan.defence, self.others, self.division.join, self._noise)
        self.holder = LabelHolder(
            plan.holder,
            {
                name: ActivationForm(tuple(one.shape[1:]), one.dtype)
                for name, one in zip(names, self.activations, strict=True)
            },
            self.tail,
            self.division.join,
            self._table(self.parties).targets,
            self.batches,
            CountedLoss(task.loss, self.labelled),
            seed,
            partial(self._seconds, plan.label_party, shares[-1]),
            busy,
            self.guarded,
        )
        self.members = [
            Party(
                number,
                plan.holder,
                head,
                self._table(number).reader(self.division.features[number]),
                self.batches,
                seed,
                partial(self._seconds, number, shares[number]),
                activations_guard(plan.defence, number, plan.label_party, seed),
            )
            for number, head in enumerate(self.heads)
        ]
        self.everybody: list[LabelHolder | Party] = [self.holder, *self.members]
        self.first: LabelHolder | LabelParty = self.holder
        if plan.label_party is not None:
            member = self.members[plan.label_party]
            member.busy = busy
            self.first = LabelParty(member, self.holder)
        self.leaks = self._leaks() if plan.measure_leaks else None
        self._live()

    def _table(self, number: int) -> AlignedExamples:
        """Return the examples of a party, or of the server (number = number of parties)."""
        return AlignedExamples(self.labelled, self.rows[number], self.seed, self.device)

    def _trained(self, part: VerticalPart) -> TrainedPart:
        """Return the part with its own optimizer."""
        return TrainedPart(part, self.model, self.task.optimizer, self.task.lr_schedule)

    # Defence and leakage

    def _noise(self, name: str, step: int) -> torch.Generator:
        """Return the generator of the noise on the gradients for a party at a step."""
        return generator(self.seed, "defence", self.others.index(name), step)

    def _leaks(self) -> PartyMeters:
        """Return the meters, which know the true labels."""
        labels = class_labels(self.train)
        classes = 0 if labels is None else count_classes(self.train, labels)
        return PartyMeters(self.others, labels, classes, self._held)

    def _held(self, name: str, step: int) -> tuple[Tensor, Tensor]:
        """Return the rows of a step's batch in the task's data, and a party's columns of them."""
        people = self.batches.at(step)
        member = next(one for one in self.members if one.name == name)
        return self.rows[member.number][people], member.read(people, step)

    # The network

    def _add(self, name: str, number: int | None, node: Node) -> None:
        """Add a node to the virtual network; number: of the party, None for the server."""
        speed = self.conditions.server_mbit * BYTES_PER_MBIT
        link = NodeLink(out=speed, into=speed)
        if number is not None:
            device = self.conditions.devices.of(number, self.seed)
            link = NodeLink(out=device.up, into=device.down)
        self.network.add(name, node, link)

    def _live(self) -> None:
        seen = self.first if self.leaks is None else MeteredHolder(self.first, self.leaks)
        self._add(self.plan.holder, self.plan.label_party, seen)
        for member in self.members:
            if member.number != self.plan.label_party:
                self._add(member.name, member.number, member)

    def _seconds(self, number: int | None, share: float, examples: int, back: bool) -> float:
        """Return the seconds of a forward or backward pass of a participant through its part."""
        speed = self.conditions.server_examples_per_second
        if number is not None:
            speed = self.conditions.devices.of(number, self.seed).examples_per_second
        return (2 if back else 1) / 3 * share * examples / speed

    def _align(self) -> None:
        """Set each participant's rows to the people whom all know, in the common order."""
        plan = self.plan
        people = len(self.train)
        ids = ids_of(self.task.train, plan.id_column)
        others = plan.others(self.parties)
        first = self.parties if plan.label_party is None else plan.label_party
        known = {n: plan.known(n, people, self.seed) for n in (*others, first)}
        theirs = {n: [ids[row] for row in rows.tolist()] for n, rows in known.items()}
        secrets = {n: plan.secret(n, self.seed) for n in known}
        holder = AlignedHolder(
            plan.holder, [party(n) for n in others], theirs[first], secrets[first]
        )
        members = [AlignedParty(party(n), plan.holder, theirs[n], secrets[n]) for n in others]
        self._add(plan.holder, plan.label_party, holder)
        for number, member in zip(others, members, strict=True):
            self._add(member.name, number, member)
        self.network.send(plan.holder, holder.begin(self.network.now))
        aligned = [holder, *members]
        self.network.run(lambda: all(one.rows is not None for one in aligned), math.inf)
        for number, one in zip((first, *others), aligned, strict=True):
            assert one.rows is not None
            self.rows[number] = known[number][one.rows]
        # The targets are always read at the server's number, even if a party has the labels.
        self.rows[self.parties] = self.rows[first]
        for meter in self.meters_:
            self.network.traffic(meter.name).tell(meter, 0.0, self.network.now)

    def _count(self, elapsed: float) -> None:
        """Add the bytes and the compute time of a step of `elapsed` seconds to the meters."""
        for meter in self.meters_:
            computed = self._computed(meter.name)
            self.network.traffic(meter.name).tell(meter, computed, elapsed)

    # The run

    def flops_per_step(self) -> float:
        return self.flops

    def advance(self, control_flags: int) -> StepResult:
        """Run a step of all parties on a batch of the people whom all know."""
        began = self.network.now
        self.network.send(self.plan.holder, self.first.begin(began))
        over = self.network.run(self._over, math.inf)
        assert over, "nobody waits for anybody for ever"
        self.step += 1
        self._count(self.network.now - began)
        loss, counted = self.holder.loss
        leaks = {} if self.leaks is None else self.leaks.numbers()
        return StepResult(
            loss=loss if counted else None,
            samples=len(self.batches.at(self.step - 1)),
            control_flags=control_flags,
            numbers={"virtual_seconds": self.network.now, **leaks},
        )

    def _over(self) -> bool:
        """Return whether all participants have finished the step, including its compute time."""
        return all(one.done > self.step and one.wake == math.inf for one in self.everybody)

    def _computed(self, name: str) -> float:
        """Return the seconds that a participant has computed since the last call."""
        for one in self.everybody:
            if one.name == name:
                seconds = one.busy.computed
                one.busy.computed = 0.0
                return seconds
        return 0.0

    # Evaluation and checkpoints

    def evaluate(self) -> dict[str, float]:
        # Evaluates the parts, as parties in separate processes do, so that the bits agree.
        return evaluate(self.task, JoinedParts(self.division), self.test, self.group, self.step)

    def weights(self) -> dict[str, Tensor]:
        self.division.store()
        return dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        return {
            "version": 1,
            "step": self.step,
            "now": self.network.now,
            "tail": self.tail.state(),
            "heads": [head.state() for head in self.heads],
            "buffers": non_persistent_buffers_of(self.model),
            "remembered": self.guarded.memory,
            "leaks": None if self.leaks is None else self.leaks.state(),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.division.load()
        self.tail.restore(state["tail"])
        for head, kept in zip(self.heads, state["heads"], strict=True):
            head.restore(kept)
        self.guarded.remember(state["remembered"])
        if self.leaks is not None:
            self.leaks.restore(state["leaks"])
        self.step = state["step"]
        for one in self.everybody:
            one.done = self.step
        self.network = VirtualNetwork()
        self.network.now = state["now"]
        self._live()

    def meters(self) -> Sequence[Meter]:
        return self.meters_

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run: parts of the model, people, and who could learn labels."""
        return facts_of(
            self.plan,
            self.division,
            self.activations,
            self.batches,
            self.batches.n,
            len(self.plan.known(0, len(self.train), self.seed)),
            {} if self.leaks is None else self.leaks.latest,
        )


def _shares(
    division: VerticalDivision, inputs: Tensor, activations: Sequence[Tensor]
) -> list[float]:
    """Return the share of each part in the model's operations, counted for these inputs."""
    given = [select(inputs, columns) for columns in division.features]
    given.append(joined([value.detach() for value in activations], division.join))
    parts = [*division.heads, division.tail]
    flops = [_flops(part.module, one) for part, one in zip(parts, given, strict=True)]
    total = sum(flops)
    if not 0 < total < math.inf:
        return [1 / len(flops)] * len(flops)
    return [one / total for one in flops]


def _flops(module: nn.Module, inputs: Tensor) -> float:
    if next(module.parameters(), None) is None:
        return 0.0
    given = to_cpu(inputs)
    return flops_per_step(module, Examples(given, given), 1)
