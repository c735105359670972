"""The clients of a federation: examples, client state, and local training.

A client's update depends on its assignment, its own examples and state, and the seed. It does not
depend, except for rounding, on the other clients of the round, on the time, or on the engine.
Malicious clients have poisoned examples, or forge their updates before sending; the server does not
know which clients are malicious.

This module has no part of the server, and sends it only messages (`dure.protocol.messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dure.federated.algorithm import ClientMemory, PersonalisedModel
from dure.federated.client.evaluation import ClientEvaluator, ClientMeasurement, measured_by
from dure.federated.client.jobs import LocalTraining, RunEngine
from dure.federated.client.poisoning import forged
from dure.federated.engines.job import ClientJob, JobResult
from dure.fleet.malicious import Attackers
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

_NOBODY: tuple[int, ClientMemory | None] = (-1, None)
"""Entry for a client without new state."""

UpdateCallback = Callable[[ClientOrder, Update, Sequence[Tensor]], None]
"""Callback for each sent update: (order, update, examples of each step).

Examples are indices of the task's training data.
"""


class ClientProtections(NamedTuple):
    """Privacy protections on the clients' side.

    Args:
        secure: client side of secure aggregation; None if clients send their updates.
        coins: secret source of the Poisson sampling of examples in every step (DP-SGD); None
            without it.
        protect: transforms an update before sending, given its assignment; None without local
            noise.
    """

    secure: PendingUpdates | None = None
    coins: Secret | None = None
    protect: Callable[[Update, Assignment], Update] | None = None


class FederatedClients:
    """All clients of this process.

    Args:
        training: makes the jobs of assignments.
        engine: trains them.
        personal: evaluation on held-out examples.
        protections: privacy protections of the updates.
        attackers: the malicious clients, which forge their updates; None without attackers.
        keep: called with every update that is sent; None without a recorder.
    """

    def __init__(
        self,
        training: LocalTraining,
        engine: RunEngine,
        personal: ClientEvaluator,
        protections: ClientProtections,
        attackers: Attackers | None = None,
        keep: UpdateCallback | None = None,
    ) -> None:
        self.training = training
        self.data = training.data
        self.algorithm = training.algorithm
        self.partial = training.work.partial
        self.engine = engine
        self.personal = personal
        self.secure, self._coins, self._protect = protections
        self.attackers = attackers
        self.checked = attackers is None  # by the engine
        self._keep = keep
        self.memories: dict[int, ClientMemory] = {}
        self.trained: dict[int, float] = {}
        """Time of each client's last training start, if data come and go."""
        self._pending: dict[int, tuple[int, ClientMemory | None]] = {}
        """By ticket: client of each unsettled update, and its new state upon acceptance."""
        self._ready: dict[int, Update] = {}
        """Updates that were computed ahead of their request."""

    # Messages to the clients

    def receive(self, message: Message, now: float = 0.0) -> Message | None:
        """Return the clients' answer to a message, or None; for clients on a network.

        Raises ValueError for a message that only a server receives.
        """
        match message:
            case Assignment():
                # A negative number would select another client's data, counted from the end.
                clients = len(self.data.parts)
                if not 0 <= message.client < clients:
                    raise ValueError(
                        f"there is no client {message.client}: there are {clients} clients"
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
        return JoinMessage(self.data.sizes)

    def work(self, assignment: Assignment, now: float, most: float | None = None) -> AssignmentCost:
        """Return the amount of work of an assignment.

        most: number of examples that can be processed in time; at least one step is done.
        """
        client = assignment.client
        # Sizes are known, unless data come and go: then the examples at this time are counted.
        data = self.data
        examples = data.sizes[client] if data.present is None else len(data.indices(client, now))
        up = assignment.nbytes if self.secure is None else 0
        return self.training.cost(examples, up, most)

    def train(
        self, orders: Sequence[ClientOrder], ahead: Sequence[ClientOrder]
    ) -> Iterator[Update]:
        """Yield the updates one after another; at most a cohort of them is in memory.

        ahead: orders that are computed with `orders` if these are fewer than the engine's cohort;
        their updates are stored until the request.
        """
        # Times of requested updates only: engines differ in the updates that they compute ahead.
        if self.data.present is not None:
            for order in orders:
                client = order.assignment.client
                self.trained[client] = max(order.began, self.trained.get(client, 0.0))
        # With nothing computed ahead and nothing to compute ahead there is no bookkeeping. An
        # attack needs all updates at once, because malicious clients may know the honest updates.
        plainly = orders and not ahead and not self._ready
        computed = self._trained(orders) if plainly else self._together(orders, ahead)
        if self.attackers is not None:
            computed = iter(forged(list(computed), self.attackers))
        return computed if self._keep is None else self._kept(orders, computed, self._keep)

    def _kept(
        self, orders: Sequence[ClientOrder], sent: Iterator[Update], keep: UpdateCallback
    ) -> Iterator[Update]:
        for order, update in zip(orders, sent, strict=True):
            if update.failure is None:
                keep(order, update, self.training.steps(order, self._coins))
            yield update

    def hold(self, update: Update, asked: Assignment) -> None:
        """Store the update with its client, for secure aggregation. asked: its assignment."""
        assert self.secure is not None
        self.secure.hold(update, asked)

    def sits_out(self, ticket: int) -> bool:
        """Return whether a stored update will be in no sum, because its model is spent."""
        return self.secure is not None and self.secure.sits_out(ticket)

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        """Return the answer to a step of a secure sum; None for a client that takes no part."""
        return None if self.secure is None else self.secure.answer(say)

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
        if self.secure is not None:
            self.secure.discard([*settled.kept, *settled.dropped])

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
        present = self.data.present
        assert present is not None
        assert self.personal.newest is not None
        own = self.personal.newest[1][client]
        there = present(len(own), now)
        if client in self.trained:
            had = present(len(own), self.trained[client])
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
        parts = [self.data.indices(client, now) for client in clients]
        # Attackers report losses on their spoilt examples too.
        whole = self._whole(weights, buffers)
        found = self.personal.losses(self.data.examples, whole, clients, parts)
        return list(zip(found, map(len, parts), strict=True))

    def _whole(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> PersonalisedModel:
        return PersonalisedModel(self.algorithm.whole(weights, self.kept().tensors), buffers)

    def kept(self) -> PersonalisedMean:
        """Return the mean of the clients' own parts of the model, over clients that took part."""
        return PersonalisedMean(self.algorithm.kept(self.memories))

    def facts(self) -> dict[str, Any]:
        """Return the engine's settings, for the report."""
        settings = self.engine.state()
        return {"engine": settings.pop("name"), **settings}

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
            "engine": self.engine.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.memories = {client: list(memory) for client, memory in state["memories"].items()}
        # Checkpoints of dure up to 0.1 do not have it.
        self.trained = dict(state.get("trained", {}))
        self.engine.restore(state["engine"])
        self._pending = {}
        self._ready = {}
        for ready in state["ready"]:
            one = Update(**ready["update"])
            self._ready[one.ticket] = one
            self._pending[one.ticket] = (one.client, ready["memory"])

    # Computation

    def close(self) -> None:
        """End the engine's processes, if there are any."""
        self.engine.close()

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
        if self.engine.made is not None:
            return self.engine.made.cohort
        jobs = [job for order in orders[:SHOWN] for job in self._jobs(order)]
        return self.engine.at(jobs).cohort if jobs else 1

    def _jobs(self, order: ClientOrder) -> list[ClientJob]:
        return self.training.jobs(order, self.memories.get(order.assignment.client))

    def _trained(self, orders: Sequence[ClientOrder]) -> Iterator[Update]:
        asked = [self._jobs(order) for order in orders]
        flat = [job for jobs in asked for job in jobs]
        # An algorithm may make several jobs per assignment (Ditto makes two): all go to the engine
        # in a single list, and are taken from its results in the same order.
        results = self.engine.at(flat).train(flat) if flat else iter(())
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
        too_few = self.training.work.too_few
        for start in range(0, len(clients), TOGETHER):
            # A limited number of models at a time: the models of all clients would not fit into
            # memory.
            some = clients[start : start + TOGETHER]
            jobs = [self._tuning(client, own(client), measure) for client in some]
            able = [job for job in jobs if not too_few(job.indices)]
            results = self.engine.at(able).tune(able) if able else iter(())
            for job in jobs:
                result = None if too_few(job.indices) else next(results)
                # A model that cannot train, or diverges, stays as it was.
                if result is None or result.failure is not None:
                    yield PersonalisedModel(job.weights, job.buffers)
                    continue
                weights = [w + d for w, d in zip(job.weights, result.delta, strict=True)]
                yield PersonalisedModel(weights, result.buffers)

    def _tuning(
        self, client: int, model: PersonalisedModel, measure: EvaluationRequest
    ) -> ClientJob:
        epochs = self.personal.fine_tune
        return self.training.fine_tuning(client, model, measure.round, measure.now, epochs)


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
