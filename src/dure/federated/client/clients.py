"""The clients' side of a federation, computed here: their examples, what they keep, and their local
training.

What a client computes depends on its assignment, its own examples and memory, and the seed; never
on who else is visited, when, or by which engine, but for rounding. Liars are clients whose examples
are poisoned, or whose updates are forged before they are sent; the server is not told who they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from dure.contracts.lr_schedule import LRSchedule, factor_at
from dure.data.examples import DatasetExamples, Examples
from dure.data.partition import Parts
from dure.federated.algorithm import Algorithm, Memory
from dure.federated.engines.job import Engine, Job, Trained
from dure.fleet.attacks import Attack
from dure.protocol.carrier import Order, Work
from dure.protocol.messages import Assignment, Update

SHOWN = 64
"""Assignments that are shown to the choice of an engine, at most."""


@dataclass(frozen=True)
class LocalWork:
    """How much a client trains in a round.

    epochs: passes over its examples; ignored if `steps` is given. batch_size: None is all of the
    client's examples.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 10

    def steps_of(self, examples: int) -> int:
        """Optimizer steps of a client with so many examples."""
        return self.steps if self.steps is not None else self.epochs * self.per_epoch(examples)

    def per_epoch(self, examples: int) -> int:
        """Batches in one pass."""
        return -(-examples // min(self.batch_size or examples, examples))

    def examples_in(self, steps: int, examples: int) -> int:
        """Examples processed in so many steps from the start of a pass."""
        epochs, rest = divmod(steps, self.per_epoch(examples))
        return epochs * examples + rest * min(self.batch_size or examples, examples)


class Clients:
    """All of them.

    parts: the examples of each, as indices. present: which of n they have at a time; None is all.
    attack, liars: what liars send, and who they are in a round. partial: whether clients send
    unfinished work at a deadline. lr_schedule: the task's. threads: that the engine's operators may
    have.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        work: LocalWork,
        algorithm: Algorithm,
        engine: Callable[[Sequence[Job], str | None, int, int | None], Engine],
        seed: int,
        present: Callable[[int, float], Tensor] | None = None,
        attack: Attack | None = None,
        liars: Callable[[int], Collection[int]] = lambda turn: (),
        partial: bool = False,
        lr_schedule: LRSchedule | None = None,
        threads: int | None = None,
    ) -> None:
        self.parts, self.local, self.algorithm, self.seed = parts, work, algorithm, seed
        self.sizes: list[int] = (
            parts.sizes.tolist() if isinstance(parts, Parts) else [len(part) for part in parts]
        )
        self.partial, self.present, self.attack, self.liars = partial, present, attack, liars
        self.lr_schedule = lr_schedule
        self.memories: dict[int, Memory] = {}
        self._make = engine
        self._engine: Engine | None = None
        self.chosen: str | None = None
        """The engine's name, once there is one."""
        self.why = ""
        """And why it is this one, in a line."""
        self.chunk = 0
        """How many jobs each of its processes gets at once; 0 where it has none."""
        self.threads = threads
        self._pending: dict[int, tuple[int, Memory | None]] = {}
        self._ready: dict[int, Update] = {}
        self._typical = 0

    # What the carrier asks

    def work(self, assignment: Assignment, now: float, most: float | None = None) -> Work:
        """What an assignment takes. most: examples that can be processed in time; at least one step
        is done."""
        examples, passes = self.count(assignment.client, now), self.algorithm.passes
        steps = self.local.steps_of(examples)
        if most is not None:
            batch = min(self.local.batch_size or examples, examples)
            steps = max(1, min(steps, int(most // (passes * batch)))) if most > 0 else 1
        return Work(steps, passes * self.local.examples_in(steps, examples), assignment.nbytes)

    def train(self, orders: Sequence[Order], ahead: Sequence[Order]) -> Iterator[Update]:
        """The updates, one after another; nobody keeps more than a cohort of them.

        ahead: computed together with these where they are fewer than the engine likes at once, and
        kept until they are asked for.
        """
        computed = self._together(orders, ahead)
        return computed if self.attack is None else iter(self._forged(list(computed), self.attack))

    def _together(self, orders: Sequence[Order], ahead: Sequence[Order]) -> Iterator[Update]:
        missing = [order for order in orders if order.assignment.ticket not in self._ready]
        if missing and ahead:
            more = [order for order in ahead if order.assignment.ticket not in self._ready]
            if self._engine is None:
                self.engine(
                    [job for order in [*missing, *more][:SHOWN] for job in self._jobs(order)]
                )
            room = (self._engine.cohort if self._engine is not None else 1) - max(
                len(missing), len(self._ready)
            )
            if room > 0 and more:
                for update in self._trained([*missing, *more[:room]]):
                    self._ready[update.ticket] = update
                missing = []
        computed = self._trained(missing) if missing else iter(())
        for order in orders:
            ready = self._ready.pop(order.assignment.ticket, None)
            yield ready if ready is not None else next(computed)

    # What clients keep

    def keep(self, tickets: Sequence[int]) -> None:
        """The server has accepted these updates: their clients keep what they learned for next
        time."""
        for ticket in tickets:
            client, memory = self._pending.pop(ticket, (-1, None))
            if memory is not None:
                self.memories[client] = memory

    def forget(self, tickets: Sequence[int]) -> None:
        """These updates did not count."""
        for ticket in tickets:
            self._pending.pop(ticket, None)

    def mark(self) -> Callable[[], None]:
        """A way back to this moment, as long as `keep` is not called."""
        pending, ready = dict(self._pending), dict(self._ready)

        def back() -> None:
            self._pending, self._ready = pending, ready

        return back

    def state(self) -> Any:
        """What clients keep, as a tree, and the updates that are ready: computed again in other
        company, they could be rounded in another way."""
        ready = [
            [
                *(one.ticket, one.client, one.round, one.examples, one.samples, one.loss),
                *(
                    list(one.delta),
                    list(one.buffers),
                    list(one.extra),
                    self._pending[one.ticket][1],
                ),
            ]
            for one in self._ready.values()
        ]
        memories = [[client, memory] for client, memory in sorted(self.memories.items())]
        return {"memories": memories, "ready": ready, "typical": self._typical}

    def restore(self, state: Any) -> None:
        self.memories = {client: list(memory) for client, memory in state["memories"]}
        self._pending, self._ready, self._typical = {}, {}, state["typical"]
        for *update, memory in state["ready"]:
            one = Update(*update)
            self._ready[one.ticket], self._pending[one.ticket] = one, (one.client, memory)

    # How they compute

    def indices(self, client: int, now: float) -> Tensor:
        """The examples that a client has at this time."""
        own = self.parts[client]
        return own if self.present is None else own[self.present(len(own), now)]

    def count(self, client: int, now: float) -> int:
        """How many examples a client has at this time."""
        return self.sizes[client] if self.present is None else len(self.indices(client, now))

    def job(self, order: Order) -> Job:
        """FedAvg's job for an assignment."""
        one: Assignment = order.assignment
        indices = self.indices(one.client, order.began)
        first = one.turn * self.local.steps_of(indices.numel())
        return Job(
            *(one.client, one.round, indices, one.weights, one.buffers, first, order.work.steps),
            turn=one.turn,
            lr_factor=factor_at(self.lr_schedule, one.round),
        )

    def engine(self, jobs: Sequence[Job]) -> Engine:
        """Who computes; chosen at the first jobs, and kept for the rest of the run, resumed or not:
        what it does at once may depend on how many these were."""
        if self._engine is None:
            again = self.chosen is not None
            if again and jobs:
                jobs = [jobs[at % len(jobs)] for at in range(self._typical)]
            self._typical = len(jobs)
            self._engine = self._make(jobs, self.chosen, self.chunk, self.threads)
            self.chosen, self.why = self._engine.name, self.why if again else self._engine.why
            self.chunk, self.threads = (
                getattr(self._engine, "chunk", 0),
                getattr(self._engine, "threads", None),
            )
        return self._engine

    def close(self) -> None:
        """Ends the engine's processes, where it has any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _jobs(self, order: Order) -> list[Job]:
        return self.algorithm.jobs(
            self.job(order), order.assignment, self.memories.get(order.assignment.client)
        )

    def _trained(self, orders: Sequence[Order]) -> Iterator[Update]:
        asked = [self._jobs(order) for order in orders]
        flat = [job for jobs in asked for job in jobs]
        results = self.engine(flat).train(flat)
        for order, jobs in zip(orders, asked, strict=True):
            yield self._update(order, jobs, [next(results) for _ in jobs])

    def _update(self, order: Order, jobs: list[Job], trained: list[Trained]) -> Update:
        one: Assignment = order.assignment
        memory = self.memories.get(one.client)
        delta, extra, memory = self.algorithm.answer(jobs, trained, one, memory)
        self._pending[one.ticket] = one.client, memory
        first = trained[0]
        examples = jobs[0].indices.numel()
        return Update(
            one.ticket,
            one.client,
            one.round,
            examples,
            first.samples,
            first.loss,
            delta,
            first.buffers,
            extra,
        )

    def _forged(self, updates: list[Update], attack: Attack) -> list[Update]:
        """The updates as they are sent: those of liars are not what they computed. Whoever knows
        the honest ones knows those that are combined with its own."""
        lying = [
            position
            for position, update in enumerate(updates)
            if update.client in self.liars(update.round)
        ]
        if not lying:
            return updates
        turn = max(update.round for update in updates)
        clients = [update.client for update in updates]
        forged = attack.forge(
            [[*update.delta, *update.extra] for update in updates], lying, self.seed, turn, clients
        )
        return [
            replace(update, delta=sent[: len(update.delta)], extra=sent[len(update.delta) :])
            for update, sent in zip(updates, forged, strict=True)
        ]


def poisoned(
    examples: Examples, parts: Sequence[Tensor], liars: Collection[int], attack: Attack
) -> tuple[Examples, list[Tensor]]:
    """(the examples and, behind them, those of liars as the attack spoils them; the parts, where
    liars have these).

    Raises ValueError for examples that the attack cannot spoil.
    """
    classes = check_poison(examples, attack)
    inputs, targets = [examples.inputs], [examples.targets]
    new, end = list(parts), len(examples)
    for client in liars:
        own_inputs, own_targets = attack.poison(*examples.batch(parts[client]), classes)
        inputs.append(own_inputs)
        targets.append(own_targets)
        new[client] = torch.arange(end, end + len(parts[client]))
        end += len(parts[client])
    return Examples(torch.cat(inputs), torch.cat(targets), None, examples.classes), new


def check_poison(examples: Examples, attack: Attack) -> int:
    """How many classes the examples have, 0 where they have none.

    Raises ValueError for examples that are no plain tensors, or that the attack cannot spoil.
    """
    if isinstance(examples, DatasetExamples) or not (
        isinstance(examples.inputs, Tensor) and isinstance(examples.targets, Tensor)
    ):
        raise ValueError(
            f"{attack} spoils examples that are two tensors, inputs and targets; these are "
            f"something else"
        )
    labels = examples.labels()
    classes = (
        len(examples.classes)
        if examples.classes
        else (int(labels.max()) + 1 if labels is not None else 0)
    )
    attack.poison(*examples.batch(torch.tensor([0])), classes)
    return classes
