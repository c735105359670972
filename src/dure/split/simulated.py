"""Learner that simulates split learning under a virtual clock.

The server and the clients are the state machines that a network drives. Their computation is real;
only the time is virtual. A device that trains n examples of the whole model in a second takes, for
a part with the share s of the model's operations,

    s / 3 · examples / n     forward            2 s / 3 · examples / n     backward

and so does the server, whose speed is a condition. All clients of this process share the modules of
one model; each has its own tensors (`dure.split.sides`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import Learner, StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.data.client_part import divide
from dure.data.examples import Examples
from dure.fleet.devices import BYTES_PER_MBIT
from dure.fleet.virtual_network import Envelope, Node, NodeLink, VirtualNetwork, nbytes
from dure.protocol.server_context import conditions_in
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.meter import Meter
from dure.split import personalised
from dure.split.activity_log import ActivityLog
from dure.split.availability import AvailabilityTracker
from dure.split.builders import SplitBuilder
from dure.split.client import SplitClient, SplitClientState
from dure.split.compressed import CompressedCutModel, CompressedNode, exchange_of
from dure.split.cutting import TracedDividedModel
from dure.split.divided_model import DividedModel
from dure.split.facts import facts_of
from dure.split.leakage.defence import class_labels, count_classes
from dure.split.leakage.meter import LeakMeter, MeteredServer
from dure.split.leakage.randomised_response import relabelled
from dure.split.messages import SERVER, client
from dure.split.orders import Amounts
from dure.split.placement import model_on, needs_doubles
from dure.split.plan import SplitPlan
from dure.split.separate_models.sides import SeparateDividedModel
from dure.split.server import TailServer
from dure.split.sides import state_from_tree, state_to_tree
from dure.tasks.batch_norm import needs_two
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import CountedLoss, mean_over
from dure.tasks.parts import JoinedTask, ModelParts
from dure.tensors.buffers import (
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)


class SimulatedSplitLearner(Learner):
    """The server and all clients of a run, in one process."""

    where = "server"

    def __init__(self, task: Task, context: RankContext, seed: int, plan: SplitPlan) -> None:
        self.device = context.device
        task = task.on(self.device)
        self.task = task
        self.plan = plan
        self.seed = seed
        self.group = context.group
        self.conditions = conditions_in(context)
        doubles = needs_doubles(plan.defence, averages=plan.rules.forgets)
        self.model = model_on(context.model(task, seed), self.device, doubles)
        self.train, self.test = examples_for(task)
        joins = needs_two(self.model, self.train)
        self.parts = divide(
            plan.partition, plan.clients, self.train, plan.batch_size, seed, joins, plan.held_out
        )
        largest = max(part.batches.batch_size for part in self.parts)
        self.flops = flops_per_step(self.model, self.train, largest)
        trained = relabelled(plan.defence, self.train, seed)
        self.divided = divided(task, self.model, trained, plan.at, largest, seed)
        self.shares = self.divided.shares
        self.heads = self.divided.heads
        self.tails = self.divided.tails
        halves = SplitBuilder(self.divided, plan, trained, seed, device=self.device)
        amounts = Amounts(
            steps=[plan.local_epochs * part.batches.steps_per_epoch for part in self.parts],
            examples=[len(part.indices) for part in self.parts],
        )
        head = self.heads.own()
        first = head if self.divided.head_is_known else None
        self.server = halves.server(amounts, first, self._server_seconds)
        self.order = self.server.order
        self.clients = [
            halves.client(number, head, part, partial(self._seconds, number))
            for number, part in enumerate(self.parts)
        ]
        self._meters = [Meter(SERVER, is_worker=False)]
        self._meters += [Meter(client(number)) for number in range(plan.clients)]
        self.units_per_epoch = 1
        # Held-out examples are in no pass over the training data.
        if plan.held_out:
            self.examples = sum(amounts.examples)
        self.round = 0
        self.now = 0.0
        self.account = ActivityLog()
        self.leaks = self._leaks() if plan.measure_leaks else None
        self.exchange = None
        self.measured = self.model
        # Values between separate parts are not compressed.
        if isinstance(self.divided, TracedDividedModel):
            self.exchange = exchange_of(plan.compression, self.divided.cut)
            if self.exchange is not None:
                self.measured = CompressedCutModel(self.divided.cut, plan.compression)
        self._begin()

    def _leaks(self) -> LeakMeter:
        """Return the meter, which knows the true labels."""
        labels = class_labels(self.train)
        crossing = self.divided.crossings_of_two()
        return LeakMeter(
            labels,
            0 if labels is None else count_classes(self.train, labels),
            crossing[0],
            crossing[-1],
        )

    def _held(self, name: str) -> tuple[Tensor, Sequence[Any]]:
        """Return a client's current batch: indices of the examples, and leaves of the inputs."""
        one = next(one for one in self.clients if one.name == name)
        return one.at(one.taken), one.party.inputs(0)

    def _begin(self) -> None:
        self.network = VirtualNetwork(watch=self.account.passed)
        self.network.now = self.now
        self.server.busy.watch = partial(self.account.did, SERVER)
        for one in self.clients:
            one.busy.watch = partial(self.account.did, one.name)
        speed = self.conditions.server_mbit * BYTES_PER_MBIT
        seen: Node = self.server
        if self.leaks is not None:
            seen = MeteredServer(self.server, self.leaks, self._held)
        self.attendance = self._attended(seen)
        self.network.add(
            SERVER, self._speaking(self.attendance or seen), NodeLink(out=speed, into=speed)
        )
        for one in self.clients:
            one.busy.drop()
            device = self.conditions.devices.of(one.number, self.seed)
            self.network.add(
                one.name, self._speaking(one), NodeLink(out=device.up, into=device.down)
            )

    def _speaking(self, node: Node) -> Node:
        """Return the node, wrapped for compression if it is on."""
        if self.exchange is None:
            return node
        return CompressedNode(node, self.exchange)

    def _attended(self, seen: Node) -> AvailabilityTracker | None:
        """Return the wrapper for availability; None if all clients are always available."""
        if self.conditions.availability.always and not self.conditions.drop_out:
            return None
        return AvailabilityTracker(self.server, seen, self.conditions, self.seed, self._lose)

    def _lose(self, name: str) -> None:
        """Drop the messages and the computation of a lost client."""
        self.network.lose(name)
        one = next(one for one in self.clients if one.name == name)
        one.party.drop()
        one.busy.drop()

    def _seconds(self, number: int, examples: int, stages: Sequence[int], back: bool) -> float:
        """Return the seconds of a client's pass through these stages."""
        device = self.conditions.devices.of(number, self.seed)
        share = sum(self.shares[stage] for stage in stages)
        return (2 if back else 1) / 3 * share * examples / device.examples_per_second

    def _server_seconds(self, examples: int, back: bool) -> float:
        """Return the seconds of a pass through the server's part."""
        speed = self.conditions.server_examples_per_second
        return (2 if back else 1) / 3 * self.shares[1] * examples / speed

    def flops_per_step(self) -> float:
        return self.flops

    # The run

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: every available client trains its local epochs."""
        before = generators_state()
        self.account.begin(self.round)
        counted_before = dict(self.order.since)
        first = self._first()
        opened = self.network.now
        self.network.send(SERVER, first)
        over = self.network.run(self._over, math.inf)
        restore_generators(before)
        assert over, "nobody waits for anybody for ever"
        self.round += 1
        # A client that takes part in the round waits from its beginning to its end.
        took_part = {
            name for name, turn in self.order.since.items() if turn != counted_before.get(name)
        }
        self._count(self.network.now - opened, took_part)
        self.now = self.network.now
        steps = self.server.losses
        self.server.losses = []
        samples = self.server.samples
        self.server.samples = 0
        counted = math.fsum(count for _, count in steps)
        leaks = {} if self.leaks is None else self.leaks.numbers()
        there = self._there(counted_before)
        return StepResult(
            loss=mean_over(math.fsum(loss * count for loss, count in steps), counted),
            samples=samples,
            control_flags=control_flags,
            numbers={"virtual_seconds": self.now, **there, **leaks},
        )

    def _first(self) -> Sequence[Envelope]:
        """Return the server's first messages of a round."""
        if self.attendance is None:
            return self.server.begin(self.round)
        # Begin with an empty network, as a resumed run does: messages of lost clients are dropped.
        self._begin()
        self.network.now = self.attendance.opens(self.now)
        return self.attendance.begin(self.round, self.network.now)

    def _there(self, before: Mapping[str, int]) -> dict[str, float]:
        """Return the numbers of turns of a round that counted and failed.

        before: newest turn of each client before the round.
        """
        if self.attendance is None:
            return {}
        turns = [name for name, turn in self.order.since.items() if turn != before.get(name)]
        return {"turns": float(len(turns)), "failed": float(self.attendance.failed)}

    def _over(self) -> bool:
        return self.order.over

    def _count(self, elapsed: float, took_part: AbstractSet[str]) -> None:
        """Add the bytes and the compute time of a round of `elapsed` seconds to the meters."""
        nodes: list[TailServer | SplitClient] = [self.server, *self.clients]
        for meter, one in zip(self._meters, nodes, strict=True):
            whole = elapsed if meter.name in took_part else 0.0
            self.network.traffic(meter.name).tell(meter, one.busy.computed, whole)
            one.busy.computed = 0.0

    # Evaluation and checkpoints

    def _known(self, one: SplitClient) -> SplitClientState:
        """Return the state of a client after its newest turn that counts."""
        return one.after(self.order.since.get(one.name, -1))

    def _load(self) -> None:
        """Copy the newest head and tail into the model."""
        self.heads.take(self.order.newest([self._known(one).own for one in self.clients]))
        self.tails.take(self.order.tails[0].own)

    def evaluate(self) -> dict[str, float]:
        self._load()
        found = evaluate(self.task, self.measured, self.test, self.group, self.round)
        held_out = [part.held_out for part in self.parts]
        own = personalised.measure(
            self.task, self.measured, self.train, held_out, self._load_own, self.seed
        )
        return found | own

    def _load_own(self, number: int) -> None:
        """Copy the head of a client into the model, beside the tail."""
        self.heads.take(self._known(self.clients[number]).own)

    def weights(self) -> dict[str, Tensor]:
        self._load()
        return dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        self._load()
        return {
            "version": 2,
            "round": self.round,
            "now": self.now,
            "order": self.order.state(),
            "head": state_to_tree(self.order.head),
            "heads": [state_to_tree(self._known(one).own) for one in self.clients],
            "tails": [state_to_tree(one.own) for one in self.order.tails],
            "remembered": [self._known(one).memory for one in self.clients],
            "buffers": non_persistent_buffers_of(self.model),
            "account": self.account.state(),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.round = state["round"]
        self.now = state["now"]
        self.order.restore(state["order"])
        head = state["head"]
        self.order.head = None if head is None else self.heads.placed(state_from_tree(head))
        held = zip(self.clients, state["heads"], state["remembered"], strict=True)
        for one, kept, memory in held:
            own = self.heads.placed(state_from_tree(kept))
            self.heads.check_kept(own)
            one.kept[self.order.since.get(one.name, -1)] = SplitClientState(own, memory)
        for tail, tree in zip(self.order.tails, state["tails"], strict=True):
            tail.own = state_from_tree(tree)
            self.tails.check_kept(tail.own)
        self.account.restore(state["account"])
        self._begin()

    def meters(self) -> Sequence[Meter]:
        return self._meters

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run: cuts, sizes of the parts, and leakage."""
        measured: dict[str, float] = self.leaks.latest if self.leaks is not None else {}
        # Targets of the client with the largest batch.
        largest = max(self.parts, key=lambda part: part.batches.batch_size)
        _, targets = self.train.batch(largest.at(0))
        facts = facts_of(
            self.plan,
            self.divided,
            self._meters[1:],
            flops=self.flops,
            target_bytes=nbytes(tree_flatten(targets)[0]),
            measured=measured,
        )
        facts["split"] |= self.account.facts()
        return facts


def divided(
    task: Task, model: nn.Module, train: Examples, at: Sequence[str], examples: int, seed: int
) -> DividedModel:
    """Return the divided model: by its files if the task has two, else cut at `at`.

    Args:
        task: the task.
        model: the model.
        train: the clients' examples.
        at: the places of the cuts.
        examples: number of examples of a client's batch.
        seed: the run's seed.

    Raises:
        ValueError: the model cannot be divided in this way.
    """
    if isinstance(task, JoinedTask) and isinstance(model, ModelParts):
        return SeparateDividedModel(task, model, train, examples, seed)
    return TracedDividedModel(task, model, at, examples, seed, CountedLoss(task.loss, train))
