"""Split learning over a network: the server's learner.

Clients connect to the server; the state machines are those of the simulation. The server's state
after every turn that counts is in the run folder (`turn.tree`): a server that is killed continues
with the turn after it, with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import CHECKPOINT, STOP, Learner, StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.data.examples import Examples
from dure.errors import RunFolderError
from dure.fleet.virtual_network import nbytes
from dure.machine.threads import threads_for
from dure.protocol.channels import Channels, HostedRun
from dure.record.checkpoint import UNREADABLE, read_tree, write_tree
from dure.record.meter import Counters, Meter
from dure.split.activity_log import ActivityLog
from dure.split.compressed import CompressedCutModel
from dure.split.messages import SERVER, client
from dure.split.network.admission import Admission
from dure.split.network.checks import MOST_BATCH, BatchSizes, Checks
from dure.split.network.control import Hello, RosterMembers
from dure.split.network.server_setup import setup_for_cut, setup_for_tail
from dure.split.network.sizes import (
    crossing_of_cut,
    crossing_of_forms,
    head_bytes,
    largest_message,
    stated_head_bytes,
)
from dure.split.network.split_server import CheckInData, SplitServer
from dure.split.orders import Amounts
from dure.split.placement import model_on, needs_doubles
from dure.split.plan import SplitPlan
from dure.split.separate_models.checks import SyntheticExamples
from dure.split.separate_models.form import check_extent, decoded
from dure.split.server import ServerSnapshot, TailServer
from dure.split.sides import SideRunner, state_from_tree, state_to_tree
from dure.tasks.batch_norm import needs_two
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import mean_over
from dure.tasks.parts import ModelParts, TailTask
from dure.tasks.task_summary import trains_of
from dure.tensors.buffers import (
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)

TURN = "turn.tree"
"""File in the run folder: the server's state after the newest turn that counts."""


class ServedSplitLearner(Learner):
    """Learner of the server.

    Args:
        task: the task.
        place: model, group and folder of this process.
        seed: the run's seed.
        plan: the plan of the run.
        connect: opens the channels to the clients.
    """

    where = "server"

    def __init__(
        self,
        task: Task,
        context: RankContext,
        seed: int,
        plan: SplitPlan,
        connect: Callable[[HostedRun], Channels],
    ) -> None:
        self.device = context.device
        task = task.on(self.device)
        self.task = task
        self.plan = plan
        self.seed = seed
        self.context = context
        self.group = context.group
        doubles = needs_doubles(plan.defence, averages=plan.rules.forgets)
        self.model = model_on(context.model(task, seed), self.device, doubles)
        train, self.test = examples_for(task)
        self.flops, hosted = self._hosted(train)
        self.channels = connect(hosted)
        entrance = Admission(self.channels, plan.clients, self._tells, self._check_hello)
        roster = entrance.wait(context.interrupted)
        self._meters = [Meter(SERVER, is_worker=False)]
        self._meters += [Meter(client(number)) for number in range(plan.clients)]
        hellos = {number: entrance.hellos[number] for number in range(plan.clients)}
        joins = self._joins(hellos)
        epochs = [BatchSizes(one.examples, plan.batch_size, joins) for one in hellos.values()]
        largest = max(one.largest for one in epochs)
        if isinstance(task, TailTask):
            assert isinstance(self.model, ModelParts)
            self.ends = setup_for_tail(task, self.model, plan, hellos, largest, seed)
        else:
            sample = self._sample(train)
            self.ends = setup_for_cut(task, self.model, plan, sample, largest, self.flops, seed)
        self.channels.allow(self._most(hellos, train, largest))
        self.heads = self.ends.heads
        self.tails = self.ends.tails
        self.amounts = Amounts(
            steps=[plan.local_epochs * one.steps_per_epoch for one in epochs],
            examples=[one.examples for one in epochs],
        )
        # If clients pass heads to each other, the server must not know the initial head.
        known = self.heads is not None and not plan.rules.hands
        head = self.heads.own() if self.heads is not None and known else None
        tail = self.tails.own()
        self.order = plan.order(
            self.amounts, head, lambda number: SideRunner(self.tails, tail, number), seed
        )
        batching = lru_cache(maxsize=64)(self.ends.batching)
        self.server = TailServer(self.order, batching, self.ends.targets)
        self.server.keeps = True
        self.server.blames = True
        self.account = ActivityLog()
        self.hall = SplitServer(
            self.server,
            self.channels,
            Checks(self.ends.agreed),
            CheckInData(epochs, [one.tests for one in hellos.values()]),
            self._meters,
            entrance,
            RosterMembers(roster.to_json(), joins, self.ends.form),
            self.account,
            self.ends.exchange,
            self._tells,
            lambda look: context.report({"federation": look}),
            self._kept,
            self.device,
        )
        self.units_per_epoch = 1
        if self.heads is not None and not self._knows_head:
            held = set(self.heads.parameters) | set(self.heads.written)
            self.elsewhere = [name for name in self.model.state_dict() if name in held]
        self.examples = max(1, sum(self.amounts.examples))
        self.round = 0
        self._before = 0.0
        self._clock = time.perf_counter()
        self._began = False
        """Whether this process has looked for a newer state than the checkpoint."""

    def _hosted(self, train: Examples) -> tuple[float, HostedRun]:
        """Return the FLOPs of a step, and the network's settings of the run."""
        plan = self.plan
        if isinstance(self.task, TailTask):
            # The cost of a step depends on heads that the server does not have.
            threads = torch.get_num_threads()
            return math.inf, HostedRun(plan.clients, self.seed, None, threads)
        typical = max(1, len(train) // plan.clients)
        size = typical if plan.batch_size is None else plan.batch_size
        sample = self._sample(train)
        flops = flops_per_step(self.model, sample, min(size, len(sample)))
        trains = trains_of(self.task, self.model)
        return flops, HostedRun(plan.clients, self.seed, trains, threads_for(flops))

    def _check_hello(self, hello: Hello) -> None:
        """Raise ValueError for a client whose `Hello` does not fit the run."""
        if self.plan.batch_size is None and hello.examples > MOST_BATCH:
            raise ValueError(
                f"it reports {hello.examples:,} examples in one batch, but a batch may have at "
                f"most {MOST_BATCH:,}"
            )
        if bool(hello.form) != isinstance(self.task, TailTask):
            mine, its = (
                ("a tail", "a whole model") if not hello.form else ("a whole model", "a head")
            )
            raise ValueError(f"it has the task of {its}, but the server has that of {mine}")
        for form in (hello.form, hello.targets):
            if form:
                check_extent(decoded(form))

    def _joins(self, hellos: Mapping[int, Hello]) -> bool:
        """Return whether a part of the model cannot train on a single example."""
        if any(hello.joins for hello in hellos.values()):
            return True
        form = hellos[min(hellos)].form
        # Clients with the whole model have checked all of it.
        return bool(form) and needs_two(self.model, SyntheticExamples(decoded(form)))

    def _most(self, hellos: Mapping[int, Hello], train: Examples, largest: int) -> int:
        """Return the maximum bytes of a client's message, from the cut and the largest batch."""
        examples = max(largest, self.task.eval_batch_size)
        divided = self.ends.divided
        if divided is not None:
            _, targets = self._sample(train).batch(torch.arange(1))
            each = nbytes(tree_leaves(targets))
            crossing = crossing_of_cut(divided.cut, examples, each)
            return largest_message(crossing, head_bytes(divided.heads))
        first = hellos[min(hellos)]
        forms = [decoded(one) for one in (first.form, first.targets, self.ends.form) if one]
        crossing = crossing_of_forms(forms, examples)
        return largest_message(crossing, stated_head_bytes(hellos))

    def _sample(self, train: Examples) -> Examples:
        """Return some examples, by which the model is traced."""
        sample = train if len(train) else self.test
        if sample is None:
            raise ValueError(
                "the server cuts the model by tracing it on an example, but its task has neither "
                "training nor test data: give some, or the tail in its own file"
            )
        return sample

    def _tells(self, text: str) -> None:
        self.context.report({"waiting": text})

    def flops_per_step(self) -> float:
        return self.flops

    # The run

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: every connected client trains its local epochs."""
        self._take_up()
        flags = 0

        def ends() -> bool:
            nonlocal flags
            flags = self.context.control_flags() & ~CHECKPOINT
            return bool(flags & STOP)

        # A server killed after the round's last turn has finished the round already.
        whole = self._is_complete or self.hall.round(self.round, ends)
        if whole:
            self.round += 1
        steps = self.server.losses
        samples = self.server.samples
        self.server.losses = []
        self.server.samples = 0
        # A run resumed from the checkpoint must not report these losses again.
        self.server.keep()
        counted = math.fsum(count for _, count in steps)
        # Clients keep only the state after their last turns, so that neither side can return to an
        # earlier round: write a checkpoint after each round.
        kept = CHECKPOINT if self.context.folder is not None else 0
        return StepResult(
            loss=mean_over(math.fsum(loss * count for loss, count in steps), counted),
            samples=samples,
            control_flags=control_flags | flags | kept,
            numbers={"wall_seconds": self._elapsed, "absent": float(len(self.hall.absent))},
            whole=whole,
        )

    @property
    def _elapsed(self) -> float:
        """Seconds of the run, over all processes that have served it."""
        return self._before + time.perf_counter() - self._clock

    def ended(self, reason: str) -> None:
        if reason != "interrupt":
            if self.plan.rules.returns and self.order.head is not None:
                self.hall.final(self.order.head)
            self.channels.over("the run is over")

    # Checkpoints

    def _kept(self) -> None:
        """Save the server's current state."""
        if self.context.folder is not None:
            write_tree(self.context.folder / TURN, self.state())

    def _take_up(self) -> None:
        """Load a newer state than the checkpoint's, if an earlier server process was killed."""
        if self._began or self.context.folder is None:
            return
        self._began = True
        path = self.context.folder / TURN
        if path.exists():
            found = read_tree(path)
            try:
                self._go_on_from(found)
            except (AttributeError, RuntimeError, *UNREADABLE) as error:
                raise RunFolderError(f"{path} does not match the training: {error}") from error

    def _go_on_from(self, found: Mapping[str, Any]) -> None:
        if found["order"]["begun"] > self.order.begun:
            self._restore(found)
            for meter, values in zip(self._meters, found["meters"], strict=True):
                meter.counters = Counters.from_list(values)

    @property
    def _is_complete(self) -> bool:
        """Whether the next round is finished already."""
        order = self.order
        return order.over and order.round == self.round and order.begun > 0

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the newest model.

        The server measures if it has the head; else the client with the newest head measures, on
        its own test data.
        """
        self._load()
        if self.ends.divided is not None and self._knows_head:
            compression = self.plan.compression
            across = CompressedCutModel(self.ends.divided.cut, compression)
            measured = across if compression.compresses else self.model
            return evaluate(self.task, measured, self.test, self.group, self.round)
        head = self.order.head if self.plan.rules.returns else None
        name = client(self.order.keeper)
        return self.hall.measure(name, self.round, self.context.interrupted, head)

    @property
    def _knows_head(self) -> bool:
        """Whether the newest head comes to the server, and the server has the head's code."""
        return self.plan.rules.returns and self.heads is not None

    def _load(self) -> None:
        """Copy the newest head and tail into the model, as far as the server has them."""
        if self._knows_head and self.heads is not None and self.order.head is not None:
            self.heads.take(self.heads.placed(self.order.head))
        self.tails.take(self.order.tails[0].own)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the whole model, or of the tail for an unknown head."""
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
            "head": state_to_tree(whole.head),
            "tails": [state_to_tree(one) for one in whole.tails],
            "losses": [list(one) for one in whole.losses],
            "samples": whole.samples,
            "meters": [meter.counters.as_list() for meter in self._meters],
            "buffers": non_persistent_buffers_of(self.model),
            "account": self.account.state(),
            "elapsed": self._elapsed,
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        if not state.get("served"):
            raise RunFolderError(
                "this run was simulated, so no remote client has a head: serve a new run"
            )
        if self._knows_head:
            load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self._restore(state)
        self.account.restore(state["account"])
        self._before = state["elapsed"]

    def _restore(self, state: Mapping[str, Any]) -> None:
        for number, (now, then) in enumerate(
            zip(self.amounts.examples, state["examples"], strict=True)
        ):
            if now != then:
                raise RunFolderError(
                    f"client {number} has {now} examples, but had {then} when the run started: "
                    "use the same data"
                )
        self.round = state["round"]
        head = None if state["head"] is None else state_from_tree(state["head"])
        tails = [state_from_tree(one) for one in state["tails"]]
        for tail in tails:
            self.tails.check_kept(tail)
        if head is not None and self.heads is not None:
            self.heads.check_kept(head)
        self.server.whole = ServerSnapshot(
            order=state["order"],
            head=head,
            tails=tails,
            losses=[(one[0], one[1]) for one in state["losses"]],
            samples=state["samples"],
        )
        self.server.back()

    def meters(self) -> list[Meter]:
        return self._meters

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run: cuts, sizes of the parts, and leakage."""
        facts = self.ends.facts(self._meters[1:])
        facts["split"] |= self.account.facts()
        return facts
