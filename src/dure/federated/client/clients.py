"""The clients of a federation: examples, client state, and local training.

A client's update depends on its assignment, its own examples and state, and the seed. It does not
depend, except for rounding, on the other clients of the round, on the time, or on the engine.
Malicious clients have poisoned examples, or forge their updates before sending; the server does not
know which clients are malicious.

This module has no part of the server, and sends it only messages (`dure.protocol.messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import Tensor

from dure.contracts.lr_schedule import LRSchedule, factor_at
from dure.data.batches import Batches, batches_per_epoch
from dure.data.keys import client_label
from dure.data.partition import ClientParts
from dure.federated.algorithm import Algorithm, ClientMemory, PersonalisedModel
from dure.federated.client.evaluation import ClientEvaluator, ClientMeasurement, measured_by
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult
from dure.fleet.attacks import Attack
from dure.privacy.poisson import PoissonBatches
from dure.protocol.carrier import AssignmentCost, ClientOrder
from dure.protocol.messages import (
    Assignment,
    EvaluationRequest,
    EvaluationResults,
    Failure,
    JoinMessage,
    Message,
    PersonalisedMean,
    PersonalisedRequest,
    ProtocolAnswer,
    ProtocolStep,
    Refuse,
    Update,
    UpdateOutcomes,
)
from dure.randomness.secret import Secret
from dure.tensors.elements import all_finite

if TYPE_CHECKING:
    # The module needs the extra "privacy", which runs without secure aggregation do not have.
    from dure.federated.client.pending_updates import PendingUpdates

SHOWN = 64
"""Largest number of assignments that the choice of an engine sees."""

TOGETHER = 50
"""Number of clients whose models are fine-tuned at once."""

FEW = 1_000
"""Largest number of clients whose examples are looked up once, not per assignment."""

_NOBODY: tuple[int, ClientMemory | None] = (-1, None)
"""Entry for a client without new state."""

MakeEngine = Callable[[Sequence[ClientJob], str | None, int, int | None], ClientEngine]
"""(jobs, name, chunk, threads) -> an engine for such jobs.

name, chunk and threads are the values of the earlier engine of a resumed run.
"""


UpdateCallback = Callable[[ClientOrder, Update, Sequence[Tensor]], None]
"""Callback for each sent update: (order, update, examples of each step).

Examples are indices of the task's training data.
"""


LossesOf = Callable[[PersonalisedModel, Sequence[int], Sequence[Tensor]], list[float]]
"""(model, clients, examples of each) -> the mean loss of each."""


def _no_losses(
    model: PersonalisedModel, clients: Sequence[int], parts: Sequence[Tensor]
) -> list[float]:
    raise ValueError("these clients are not asked for losses")


@dataclass(frozen=True)
class LocalWork:
    """Amount of a client's training in a round.

    epochs: passes over its examples; ignored if `steps` is given. batch_size: None is all of the
    client's examples. needs_two: whether the model cannot train on a single example. A single
    example at the end of a pass then joins the batch before it; a client with a single example has
    no update.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 10
    needs_two: bool = False

    def steps_of(self, examples: int) -> int:
        """Return the number of optimizer steps of a client with `examples` examples."""
        return self.steps if self.steps is not None else self.epochs * self.per_epoch(examples)

    def per_epoch(self, examples: int) -> int:
        """Return the number of batches in a pass."""
        return batches_per_epoch(examples, self.batch(examples), self.needs_two)

    def most_samples(self, examples: int) -> int:
        """Return the largest number of examples processed in a round."""
        # A single example at the end of a pass may join the batch before it.
        return self.steps_of(examples) * min(self.batch(examples) + 1, examples)

    def batch(self, examples: int) -> int:
        """Return the number of examples of a step that is not the last of a pass."""
        return min(self.batch_size or examples, examples)

    def examples_in(self, steps: int, examples: int) -> int:
        """Return the number of examples in `steps` steps from the start of a pass."""
        epochs, rest = divmod(steps, self.per_epoch(examples))
        return epochs * examples + rest * self.batch(examples)


class FederatedClients:
    """All clients of this process.

    Args:
        parts: the examples of each client, as indices.
        work: amount of training in a round.
        algorithm: its client hooks are called.
        engine: makes the engine that trains.
        personal: evaluation on held-out examples.
        seed: of the run.
        present: returns the available ones among n examples at a time; None is all.
        attack: forgery of malicious clients' updates; None without attackers.
        liars: returns the malicious clients of a round.
        partial: whether clients send unfinished work at a deadline.
        lr_schedule: the task's learning rate schedule.
        threads: thread limit of the engine's operators.
        names: names of the clients; None if the data have none.
        holding: client side of secure aggregation; None if clients send their updates.
        keep: called with every update that is sent; None without a recorder.
        coins: secret source of the Poisson sampling of examples in every step (DP-SGD); None
            without it.
        protect: transforms an update before sending, given its assignment; None without local
            noise.
        losses: losses of a model on the training examples of clients.
    """

    def __init__(
        self,
        *,
        parts: Sequence[Tensor],
        work: LocalWork,
        algorithm: Algorithm,
        engine: MakeEngine,
        personal: ClientEvaluator,
        seed: int,
        present: Callable[[int, float], Tensor] | None = None,
        attack: Attack | None = None,
        liars: Callable[[int], Collection[int]] = lambda turn: (),
        partial: bool = False,
        lr_schedule: LRSchedule | None = None,
        threads: int | None = None,
        names: Sequence[str] | None = None,
        holding: PendingUpdates | None = None,
        keep: UpdateCallback | None = None,
        coins: Secret | None = None,
        protect: Callable[[Update, Assignment], Update] | None = None,
        losses: LossesOf = _no_losses,
    ) -> None:
        self._losses = losses
        self.names = names
        self.holding = holding
        self._keep = keep
        self._coins = coins
        self._protect = protect
        self.parts = list(parts) if len(parts) <= FEW else parts
        self.local = work
        self.algorithm = algorithm
        self.personal = personal
        self.seed = seed
        self.sizes: list[int] = (
            parts.sizes.tolist()
            if isinstance(parts, ClientParts)
            else [len(part) for part in parts]
        )
        self.present = present
        self.attack = attack
        self.liars = liars
        self.partial = partial
        self.checked = attack is None  # by the engine
        self.lr_schedule = lr_schedule
        self.memories: dict[int, ClientMemory] = {}
        self.trained: dict[int, float] = {}
        """Time of each client's last training start, if data come and go."""
        self.look: Callable[[], None] | None = None
        """Called between batches by engines that train one client after another.

        An exception of the callback ends the training.
        """
        self._make = engine
        self._engine: ClientEngine | None = None
        self.chosen: str | None = None
        """Name of the engine, once chosen."""
        self.why = ""
        """Reason for the choice of the engine, in a line."""
        self.chunk = 0
        """Number of jobs per process and message; 0 without processes."""
        self.threads = threads
        self._pending: dict[int, tuple[int, ClientMemory | None]] = {}
        """By ticket: client of each unsettled update, and its new state upon acceptance."""
        self._ready: dict[int, Update] = {}
        """Updates that were computed ahead of their request."""
        # Most clients do the same amount of work, in every round.
        self._known_work = lru_cache(maxsize=FEW)(self._work)
        self._known_steps = lru_cache(maxsize=FEW)(work.steps_of)

    # Messages to the clients

    def receive(self, message: Message, now: float = 0.0) -> Message | None:
        """Return the clients' answer to a message, or None; for clients on a network.

        Raises ValueError for a message that only a server receives.
        """
        match message:
            case Assignment():
                # A negative number would select another client's data, counted from the end.
                if not 0 <= message.client < len(self.parts):
                    raise ValueError(
                        f"there is no client {message.client}: there are {len(self.parts)} clients"
                    )
                order = ClientOrder(message, now, self.work(message, now))
                return next(self.train([order], []))
            case ProtocolStep():
                return self.answer(message)
            case EvaluationRequest():
                return self.measure(message)
            case PersonalisedRequest():
                return self.kept()
            case UpdateOutcomes():
                self.settle(message)
            # On a network a client learns the outcome of its own assignment, and not of a whole
            # round.
            case Refuse():
                self.settle(UpdateOutcomes([], [message.ticket]))
            case _:
                raise ValueError(f"clients cannot process {type(message).__name__}")
        return None

    def join(self) -> JoinMessage:
        """Return the clients' introduction."""
        return JoinMessage(self.sizes)

    def work(self, assignment: Assignment, now: float, most: float | None = None) -> AssignmentCost:
        """Return the amount of work of an assignment.

        most: number of examples that can be processed in time; at least one step is done.
        """
        client = assignment.client
        # Sizes are known, unless data come and go: then the examples at this time are counted.
        examples = self.sizes[client] if self.present is None else len(self.indices(client, now))
        up = assignment.nbytes if self.holding is None else 0
        return self._known_work(examples, up, most)

    def _work(self, examples: int, up: int, most: float | None) -> AssignmentCost:
        passes = self.algorithm.passes
        steps = self.local.steps_of(examples)
        if most is not None:
            # In whole steps; an algorithm may compute several gradients of each example.
            in_time = int(most // (passes * self.local.batch(examples))) if most > 0 else 1
            steps = max(1, min(steps, in_time))
        return AssignmentCost(steps, passes * self.local.examples_in(steps, examples), up)

    def train(
        self, orders: Sequence[ClientOrder], ahead: Sequence[ClientOrder]
    ) -> Iterator[Update]:
        """Yield the updates one after another; at most a cohort of them is in memory.

        ahead: orders that are computed with `orders` if these are fewer than the engine's cohort;
        their updates are stored until the request.
        """
        # Times of requested updates only: engines differ in the updates that they compute ahead.
        if self.present is not None:
            for order in orders:
                client = order.assignment.client
                self.trained[client] = max(order.began, self.trained.get(client, 0.0))
        # With nothing computed ahead and nothing to compute ahead there is no bookkeeping. An
        # attack needs all updates at once, because malicious clients may know the honest updates.
        plainly = orders and not ahead and not self._ready
        computed = self._trained(orders) if plainly else self._together(orders, ahead)
        if self.attack is not None:
            computed = iter(self._forged(list(computed), self.attack))
        return computed if self._keep is None else self._kept(orders, computed, self._keep)

    def _kept(
        self, orders: Sequence[ClientOrder], sent: Iterator[Update], keep: UpdateCallback
    ) -> Iterator[Update]:
        for order, update in zip(orders, sent, strict=True):
            if update.failure is None:
                keep(order, update, self._steps(order))
            yield update

    def _steps(self, order: ClientOrder) -> list[Tensor]:
        """Return the examples of each step of FedAvg's job, as indices of the training data."""
        one = order.assignment
        own = self.indices(one.client, order.began)
        count = len(own)
        steps = range(order.work.steps)
        size = self.local.batch_size
        if self._coins is not None:
            drawn = PoissonBatches(count, size, self._coins, one.client, one.turn)
            return [own[drawn.at(step)] for step in steps]
        batches = Batches(count, size, self.seed, one.client, self.local.needs_two)
        first = one.turn * self._known_steps(count)
        return [own[batches.at(first + step)] for step in steps]

    def hold(self, update: Update, asked: Assignment) -> None:
        """Store the update with its client, for secure aggregation. asked: its assignment."""
        assert self.holding is not None
        self.holding.hold(update, asked)

    def sits_out(self, ticket: int) -> bool:
        """Return whether a stored update will be in no sum, because its model is spent."""
        return self.holding is not None and self.holding.sits_out(ticket)

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        """Return the answer to a step of a secure sum; None for a client that takes no part."""
        return None if self.holding is None else self.holding.answer(say)

    def keeps(self, ticket: int) -> ClientMemory | None:
        """Return the state that an update's client stores upon acceptance; None without any."""
        return self._pending.get(ticket, _NOBODY)[1]

    def settle(self, settled: UpdateOutcomes) -> None:
        """Store the new state of clients with accepted updates, and discard the others."""
        for ticket in settled.kept:
            client, memory = self._pending.pop(ticket, _NOBODY)
            # Most algorithms have no client state: then no entry is made, for any number of
            # clients.
            if memory is not None:
                self.memories[client] = memory
        for ticket in settled.dropped:
            self._pending.pop(ticket, None)
        if self.holding is not None:
            self.holding.discard([*settled.kept, *settled.dropped])

    def measure(self, measure: EvaluationRequest) -> EvaluationResults:
        """Return measurements of the global and the personalised models on data outside training.

        The measurement changes no state: clients continue as before.
        """
        personal = self.personal
        found: dict[str, Mapping[int, ClientMeasurement]] = {}
        # A single object for all clients: `ClientEvaluator` loads a model only if the object
        # changes.
        whole = self._whole(measure.weights, measure.buffers)
        if personal.clients:
            found |= self._held_out(measure, whole)
        if personal.comers:
            found |= self._newest(measure, whole)
        names = ["loss", *personal.task.measures]
        return measured_by(found, names, personal.without)

    def _held_out(
        self, measure: EvaluationRequest, whole: PersonalisedModel
    ) -> dict[str, dict[int, ClientMeasurement]]:
        personal = self.personal
        found = {"client": personal.over(repeat(whole))}
        own = partial(self._own, measure, whole)
        if personal.fine_tune:
            found["personal"] = personal.over(self._tuned(own, measure))
        # Without any personalised model these numbers would repeat the global model's.
        elif any(own(client) is not whole for client in personal.clients):
            found["personal"] = personal.over(map(own, personal.clients))
        return found

    def _newest(
        self, measure: EvaluationRequest, whole: PersonalisedModel
    ) -> dict[str, dict[int, ClientMeasurement]]:
        """Return measurements of global and frozen model on data that arrived since training."""
        come = {client: self._come(client, measure.now) for client in self.personal.comers}
        parts = {client: part for client, part in come.items() if len(part)}
        found = {"newest": self.personal.of_the_newest(whole, parts)}
        if measure.frozen:
            frozen = self._whole(measure.frozen, measure.frozen_buffers)
            found["frozen_newest"] = self.personal.of_the_newest(frozen, parts)
        return found

    def _come(self, client: int, now: float) -> Tensor:
        """Return the examples that a client has gained since its last training start."""
        assert self.present is not None
        assert self.personal.newest is not None
        own = self.personal.newest[1][client]
        there = self.present(len(own), now)
        if client in self.trained:
            had = self.present(len(own), self.trained[client])
            there = there[torch.isin(there, had, invert=True)]
        return own[there]

    def losses(
        self,
        clients: Sequence[int],
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        now: float,
    ) -> list[tuple[float, int]]:
        """Return (mean loss of the model, number of examples) on each client's present data."""
        parts = [self.indices(client, now) for client in clients]
        found = self._losses(self._whole(weights, buffers), clients, parts)
        return list(zip(found, map(len, parts), strict=True))

    def _whole(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> PersonalisedModel:
        return PersonalisedModel(self.algorithm.whole(weights, self.kept().tensors), buffers)

    def kept(self) -> PersonalisedMean:
        """Return the mean of the clients' own parts of the model, over clients that took part."""
        return PersonalisedMean(self.algorithm.kept(self.memories))

    def facts(self) -> dict[str, Any]:
        """Return the engine's settings, for the report."""
        return {
            "engine": self.chosen,
            "why": self.why,
            "chunk": self.chunk,
            "threads": self.threads,
        }

    # State

    def state(self) -> dict[str, Any]:
        """Return the clients' state, as a tree for checkpoints, with the updates computed ahead.

        Recomputed in another cohort, these updates could be rounded differently.
        """
        return {
            "memories": dict(sorted(self.memories.items())),
            "trained": dict(sorted(self.trained.items())),
            "ready": [
                {"update": _written(one), "memory": self._pending.get(one.ticket, _NOBODY)[1]}
                for one in self._ready.values()
            ],
            "engine": {
                "name": self.chosen,
                "why": self.why,
                "chunk": self.chunk,
                "threads": self.threads,
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.memories = {client: list(memory) for client, memory in state["memories"].items()}
        # Checkpoints of dure up to 0.1 do not have it.
        self.trained = dict(state.get("trained", {}))
        engine = state["engine"]
        self.chosen = engine["name"]
        self.why = engine["why"]
        self.chunk = engine["chunk"]
        self.threads = engine["threads"]
        self._pending = {}
        self._ready = {}
        for ready in state["ready"]:
            one = Update(**ready["update"])
            self._ready[one.ticket] = one
            self._pending[one.ticket] = (one.client, ready["memory"])

    # Computation

    def indices(self, client: int, now: float) -> Tensor:
        """Return the examples of a client at this time, as indices."""
        own = self.parts[client]
        return own if self.present is None else own[self.present(len(own), now)]

    def engine(self, jobs: Sequence[ClientJob]) -> ClientEngine:
        """Return the engine, chosen at the first jobs for the rest of the run.

        A resumed run uses the same engine, because the cohort size depends on the number of these
        jobs.
        """
        if self._engine is None:
            again = self.chosen is not None
            engine = self._make(jobs, self.chosen, self.chunk, self.threads)
            self._engine = engine
            self.chosen = engine.name
            self.why = self.why if again else engine.why
            self.chunk = engine.chunk
            self.threads = engine.threads
        self._engine.look = self.look
        return self._engine

    def close(self) -> None:
        """End the engine's processes, if there are any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _together(
        self, orders: Sequence[ClientOrder], ahead: Sequence[ClientOrder]
    ) -> Iterator[Update]:
        missing = [order for order in orders if order.assignment.ticket not in self._ready]
        if missing and ahead:
            more = [order for order in ahead if order.assignment.ticket not in self._ready]
            # Two bounds at once: the jobs of this call are at most a cohort, and so are the updates
            # stored ahead.
            room = self._cohort([*missing, *more]) - max(len(missing), len(self._ready))
            if room > 0 and more:
                for update in self._trained([*missing, *more[:room]]):
                    self._ready[update.ticket] = update
                missing = []
        computed = self._trained(missing) if missing else iter(())
        for order in orders:
            ready = self._ready.pop(order.assignment.ticket, None)
            yield ready if ready is not None else next(computed)

    def _cohort(self, orders: Sequence[ClientOrder]) -> int:
        """Return the engine's cohort size; orders: the orders at which the engine may be chosen."""
        if self._engine is not None:
            return self._engine.cohort
        jobs = [job for order in orders[:SHOWN] for job in self._jobs(order)]
        return self.engine(jobs).cohort if jobs else 1

    def _jobs(self, order: ClientOrder) -> list[ClientJob]:
        """Return the engine's jobs for an assignment: FedAvg's job, as the algorithm changes it.

        The list is empty for a client that has too few examples to train.
        """
        one = order.assignment
        indices = self.indices(one.client, order.began)
        if self._too_few(indices):
            return []
        job = ClientJob(
            client=one.client,
            round=one.round,
            indices=indices,
            weights=one.weights,
            buffers=one.buffers,
            # As if all earlier turns had been done in full: a client that stopped at a deadline
            # does not shift its later batches.
            first_step=one.turn * self._known_steps(indices.numel()),
            steps=order.work.steps,
            turn=one.turn,
            lr_factor=self._factor(one.round),
            joins=self.local.needs_two,
            name=self._name(one.client),
        )
        return self.algorithm.jobs(job, one, self.memories.get(one.client))

    def _too_few(self, indices: Tensor) -> bool:
        return self.local.needs_two and indices.numel() < 2

    def _name(self, client: int) -> str | None:
        return None if self.names is None else client_label(client, self.names)

    def _factor(self, round: int) -> float:
        return 1.0 if self.lr_schedule is None else factor_at(self.lr_schedule, round)

    def _trained(self, orders: Sequence[ClientOrder]) -> Iterator[Update]:
        asked = [self._jobs(order) for order in orders]
        flat = [job for jobs in asked for job in jobs]
        # An algorithm may make several jobs per assignment (Ditto makes two): all go to the engine
        # in a single list, and are taken from its results in the same order.
        results = self.engine(flat).train(flat) if flat else iter(())
        for order, jobs in zip(orders, asked, strict=True):
            if jobs:
                yield self._update(order.assignment, jobs, [next(results) for _ in jobs])
            else:
                too_few: Failure = "it has one example, of which batch norm has no statistics"
                yield _failed(order.assignment, 1, too_few)

    def _update(self, asked: Assignment, jobs: list[ClientJob], trained: list[JobResult]) -> Update:
        failure = next((each.failure for each in trained if each.failure is not None), None)
        if failure is not None:
            return _failed(asked, jobs[0].indices.numel(), failure)
        memory = self.memories.get(asked.client)
        delta, extra, memory = self.algorithm.answer(jobs, trained, asked, memory)
        # Engines have checked the weights; other state of a client (a correction, buffers of its
        # personalised model) would spoil all its future rounds.
        if memory is not None and not all(map(all_finite, memory)):
            examples = jobs[0].indices.numel()
            return _failed(asked, examples, "what it keeps became not finite")
        self._pending[asked.ticket] = (asked.client, memory)
        # The first job is for the global model; others are not reported.
        first = trained[0]
        update = Update(
            ticket=asked.ticket,
            client=asked.client,
            round=asked.round,
            examples=jobs[0].indices.numel(),
            samples=first.samples,
            loss=first.loss,
            delta=delta,
            buffers=self.algorithm.sent_buffers(first, asked),
            extra=extra,
            counted=first.counted,
            steps=jobs[0].steps if first.steps is None else first.steps,
        )
        return update if self._protect is None else self._protect(update, asked)

    def _own(
        self, measure: EvaluationRequest, whole: PersonalisedModel, client: int
    ) -> PersonalisedModel:
        """Return the client's personalised model, or the global model if there is none."""
        # Personalised weights without buffers are measured with the global buffers.
        kept = self.algorithm.own(measure.weights, self.memories.get(client))
        if kept is None:
            return whole
        return kept if kept.buffers is not None else kept._replace(buffers=measure.buffers)

    def _tuned(
        self, own: Callable[[int], PersonalisedModel], measure: EvaluationRequest
    ) -> Iterator[PersonalisedModel]:
        """Yield the models of measured clients after `fine_tune` epochs.

        Each client trains on its present data.
        """
        clients = self.personal.clients
        for start in range(0, len(clients), TOGETHER):
            # A limited number of models at a time: the models of all clients would not fit into
            # memory.
            some = clients[start : start + TOGETHER]
            jobs = [self._tuning(client, own(client), measure) for client in some]
            able = [job for job in jobs if not self._too_few(job.indices)]
            results = self.engine(able).tune(able) if able else iter(())
            for job in jobs:
                result = None if self._too_few(job.indices) else next(results)
                # A model that cannot train, or diverges, stays as it was.
                if result is None or result.failure is not None:
                    yield PersonalisedModel(job.weights, job.buffers)
                    continue
                weights = [w + d for w, d in zip(job.weights, result.delta, strict=True)]
                yield PersonalisedModel(weights, result.buffers)

    def _tuning(
        self, client: int, model: PersonalisedModel, measure: EvaluationRequest
    ) -> ClientJob:
        indices = self.indices(client, measure.now)
        steps = self.personal.fine_tune * self.local.per_epoch(len(indices))
        assert model.buffers is not None
        return ClientJob(
            client=client,
            round=measure.round,
            indices=indices,
            weights=model.weights,
            buffers=model.buffers,
            first_step=measure.round * steps,
            steps=steps,
            turn=measure.round,
            lr_factor=self._factor(max(measure.round - 1, 0)),  # of the last round
            joins=self.local.needs_two,
            name=self._name(client),
        )

    def _forged(self, updates: list[Update], attack: Attack) -> list[Update]:
        """Return the updates as they are sent, with forged updates of malicious clients.

        An omniscient attacker knows the honest updates that are combined with its own.
        """
        # A client without an update has nothing to forge, and no attacker knows its update.
        there = [update for update in updates if update.failure is None]
        lying = [
            position
            for position, update in enumerate(there)
            if update.client in self.liars(update.round)
        ]
        if not lying:
            return updates
        # Without rounds the combined updates may start from several models.
        turn = max(update.round for update in there)
        clients = [update.client for update in there]
        # Extras of an algorithm (SCAFFOLD's controls) are forged with the update, and split off
        # below.
        honest = [[*update.delta, *update.extra] for update in there]
        forged = iter(attack.forge(honest, lying, self.seed, turn, clients=clients))
        return [
            update if update.failure is not None else _with(update, next(forged))
            for update in updates
        ]


def _failed(asked: Assignment, examples: int, failure: Failure) -> Update:
    """Return the answer of a client without an update; its state stays unchanged."""
    return Update(
        ticket=asked.ticket,
        client=asked.client,
        round=asked.round,
        examples=examples,
        samples=0,
        loss=0.0,
        delta=(),
        buffers=(),
        failure=failure,
    )


def _with(update: Update, sent: Sequence[Tensor]) -> Update:
    """Return the update with other tensors: deltas, then extras."""
    deltas = len(update.delta)
    return replace(update, delta=sent[:deltas], extra=sent[deltas:])


def _written(update: Update) -> dict[str, Any]:
    """Return the update as a tree for checkpoints."""
    return {
        "ticket": update.ticket,
        "client": update.client,
        "round": update.round,
        "examples": update.examples,
        "samples": update.samples,
        "loss": update.loss,
        "delta": list(update.delta),
        "buffers": list(update.buffers),
        "extra": list(update.extra),
        "counted": update.counted,
        "failure": update.failure,
        "steps": update.steps,
    }
