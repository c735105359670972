"""Split learning over a network: the server's learner.

Its clients come to it; what they and it do is decided by the state machines of the simulation. What
the server knows after every turn that counts lies in the run folder (`turn.tree`): a server that is
killed goes on with the turn after it, by the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dure.contracts.channels import Channels, Hosted
from dure.contracts.strategy import CHECKPOINT, STOP, Learner, Place, Progress, examples_for
from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.errors import RunFolderError
from dure.fleet.virtual import nbytes
from dure.machine.threads import threads_for
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.record.disk import write_atomically
from dure.record.meter import Meter
from dure.split.across import AcrossTheCut
from dure.split.compressed import exchange_of
from dure.split.cutting import Cut
from dure.split.facts import facts_of
from dure.split.halves import Halves
from dure.split.leakage.randomised_response import relabelled
from dure.split.messages import SERVER, client
from dure.split.network.checks import Checks
from dure.split.network.entrance import Entrance
from dure.split.network.forward import Forward
from dure.split.network.hall import Hall
from dure.split.orders import Amounts
from dure.split.plan import Plan
from dure.split.server import Whole
from dure.split.states import read, written
from dure.tasks.batch_norm import needs_two
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import CountedLoss, mean_over
from dure.tasks.trained import trains_of
from dure.tensors.buffers import load_passing_buffers, load_weights, passing_buffers

TURN = "turn.tree"
"""In the run folder: what the server knew after the newest turn that counts."""


class ServedLearner(Learner):
    """The server of a run."""

    unit = "round"
    where = "server"

    def __init__(
        self,
        task: Task,
        place: Place,
        seed: int,
        plan: Plan,
        connect: Callable[[Hosted], Channels],
    ) -> None:
        self.task = task
        self.plan = plan
        self.seed = seed
        self.place = place
        self.group = place.group
        self.model = place.model(task, seed).train()
        train, self.test = examples_for(self.model, task)
        sample = train if len(train) else self.test
        if sample is None:
            raise ValueError(
                "the server cuts the model by tracing it on an example, and the task has neither "
                "training nor test data here: give it some, or the tail as a file of its own"
            )
        typical = max(1, len(train) // plan.clients)
        size = typical if plan.batch_size is None else plan.batch_size
        self.flops = flops_per_step(self.model, sample, min(size, len(sample)))
        hosted = Hosted(
            clients=plan.clients,
            seed=seed,
            trains=trains_of(task, self.model),
            threads=threads_for(self.flops),
        )
        self.channels = connect(hosted)
        entrance = Entrance(self.channels, plan.clients, self._tells)
        entrance.wait(place.interrupted)
        self._meters = [Meter(SERVER, is_worker=False)]
        self._meters += [Meter(client(number)) for number in range(plan.clients)]
        joins = needs_two(self.model, sample)
        sizes = [entrance.hellos[number].examples for number in range(plan.clients)]
        batches = [Batches(count, plan.batch_size, seed, n, joins) for n, count in enumerate(sizes)]
        largest = max(one.batch_size for one in batches)
        # Its examples are elsewhere: each batch tells what it counts.
        losses = CountedLoss(task.loss, None)
        self.divided = Cut(task, self.model, plan.at, largest, seed, losses)
        self.cut = self.divided.cut
        seen = relabelled(plan.defence, sample, seed)
        halves = Halves(self.divided, plan, seen, seed)
        self.heads = self.divided.heads
        self.tails = self.divided.tails
        self.amounts = Amounts(
            steps=[plan.local_epochs * one.steps_per_epoch for one in batches], examples=sizes
        )
        # Where clients hand it on themselves, their head is none of the server's business.
        head = None if plan.rules.hands else self.heads.own()
        self.server = halves.server(self.amounts, head)
        self.server.keeps = True
        self.order = self.server.order
        _, one = sample.batch(torch.arange(1))
        self._target_bytes = nbytes(tree_flatten(one)[0])
        """Of the targets of an example."""
        targets = 0 if self.server.targets is None else self.server.targets.num_leaves
        self.hall = Hall(
            self.server,
            self.channels,
            # A last example that is left over joins the batch before, where one alone will not do.
            Checks(self.cut, self.heads, targets, largest + int(joins)),
            Forward(self.cut, plan.compression),
            self._meters,
            entrance,
            exchange_of(plan.compression, self.cut),
            self._tells,
            lambda look: place.report({"federation": look}),
            self._kept,
        )
        self.units_per_epoch = 1
        if not self._knows_head:
            held = set(self.heads.parameters) | set(self.heads.written)
            self.elsewhere = [name for name in self.model.state_dict() if name in held]
        self.examples = max(1, sum(sizes))
        self.round = 0
        self._began = False
        """Whether this process has done anything yet."""

    def _tells(self, text: str) -> None:
        self.place.report({"waiting": text})

    def flops_per_step(self) -> float:
        return self.flops

    # The run

    def advance(self, wish: int) -> Progress:
        """One round: every client that is there trains its local epochs."""
        self._take_up()
        wished = 0

        def ends() -> bool:
            nonlocal wished
            wished = self.place.wish() & ~CHECKPOINT
            return bool(wished & STOP)

        # A server that was killed may have had all of it, and not said so yet.
        whole = self._is_complete or self.hall.round(self.round, ends)
        if whole:
            self.round += 1
        steps = self.server.losses
        samples = self.server.samples
        self.server.losses = []
        self.server.samples = 0
        # What is said of them now is not said again by a run that goes on from the checkpoint.
        self.server.keep()
        counted = math.fsum(count for _, count in steps)
        # The clients keep what they knew after their last turns, and no more: neither side can
        # come back to an earlier round.
        kept = CHECKPOINT if self.place.folder is not None else 0
        return Progress(
            loss=mean_over(math.fsum(loss * count for loss, count in steps), counted),
            samples=samples,
            wish=wish | wished | kept,
            numbers={"absent": float(len(self.hall.absent))},
            whole=whole,
        )

    def ended(self, reason: str) -> None:
        if reason != "interrupt":
            self.channels.over("the run is over")

    # What is kept

    def _kept(self) -> None:
        """Writes down what the server knows now."""
        if self.place.folder is not None:
            write_atomically(self.place.folder / TURN, tree_to_bytes(self.state()))

    def _take_up(self) -> None:
        """What was written down after the newest checkpoint, by a server that was killed."""
        if self._began or self.place.folder is None:
            return
        self._began = True
        path = self.place.folder / TURN
        if path.exists():
            found = tree_from_bytes(path.read_bytes())
            if found["order"]["begun"] > self.order.begun:
                self._restore(found)

    @property
    def _is_complete(self) -> bool:
        """Whether the round that is next is done."""
        order = self.order
        return order.over and order.round == self.round and order.begun > 0

    def evaluate(self) -> dict[str, float]:
        """By the server where it knows the head; else by the client that has the newest one, on
        that one's test data."""
        if self._knows_head:
            self._load()
            model = AcrossTheCut(self.cut, self.plan.compression)
            measured = model if self.plan.compression.compresses else self.model
            return evaluate(self.task, measured, self.test, self.group, self.round)
        self.tails.take(self.order.tails[0].own)
        return self.hall.measure(client(self.order.keeper), self.round, self.place.interrupted)

    @property
    def _knows_head(self) -> bool:
        return self.plan.rules.returns

    def _load(self) -> None:
        """The newest head and tail into the model, as far as the server knows them."""
        if self._knows_head and self.order.head is not None:
            self.heads.take(self.order.head)
        self.tails.take(self.order.tails[0].own)

    def weights(self) -> dict[str, Tensor]:
        """The whole model's where the server knows the head; else those of the tail."""
        self._load()
        state = self.model.state_dict()
        return {name: value for name, value in state.items() if name not in self.elsewhere}

    def state(self) -> dict[str, Any]:
        whole = self.server.whole
        if whole is None:
            self.server.keep()
            whole = self.server.whole
        assert whole is not None
        return {
            "version": 1,
            "served": True,
            "round": self.round,
            "examples": list(self.amounts.examples),
            "order": dict(whole.order),
            "head": written(whole.head),
            "tails": [written(one) for one in whole.tails],
            "losses": [list(one) for one in whole.losses],
            "samples": whole.samples,
            "meters": [meter.counters.as_list() for meter in self._meters],
            "buffers": passing_buffers(self.model),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        if not state.get("served"):
            raise RunFolderError(
                "this run was simulated, and its clients' heads are not elsewhere: serve a new one"
            )
        if self._knows_head:
            load_weights(self.model, weights)
        load_passing_buffers(self.model, state["buffers"])
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        for number, (now, then) in enumerate(
            zip(self.amounts.examples, state["examples"], strict=True)
        ):
            if now != then:
                raise RunFolderError(
                    f"client {number} has {now} examples, and had {then} when the run began: it "
                    f"has to go on with the same"
                )
        self.round = state["round"]
        self.server.whole = Whole(
            order=state["order"],
            head=None if state["head"] is None else read(state["head"]),
            tails=[read(one) for one in state["tails"]],
            losses=[(one[0], one[1]) for one in state["losses"]],
            samples=state["samples"],
        )
        self.server.back()

    def meters(self) -> list[Meter]:
        return self._meters

    def facts(self) -> dict[str, Any]:
        """Where the model was cut, how much of it each side has, and who could learn what."""
        return facts_of(
            self.plan,
            self.divided,
            self._meters[1:],
            flops=self.flops,
            target_bytes=self.divided.examples * self._target_bytes,
            measured={},
        )
