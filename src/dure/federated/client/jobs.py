"""Jobs of the clients, and the engine of a run that trains them.

    assignment -> FedAvg's job, as the algorithm changes it -> engine -> result

A job has the client's examples, the weights it starts from, and the position of its batches in the
client's order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from dure.contracts.lr_schedule import LRSchedule, factor_at
from dure.data.batches import Batches, batches_per_epoch
from dure.data.examples import Examples
from dure.data.keys import client_label
from dure.data.partition import ClientParts
from dure.federated.algorithm import Algorithm, ClientMemory, PersonalisedModel
from dure.federated.engines.job import ClientEngine, ClientJob
from dure.privacy.poisson import PoissonBatches
from dure.protocol.carrier import AssignmentCost, ClientOrder
from dure.randomness.secret import Secret

FEW = 1_000
"""Largest number of clients whose examples are looked up once, not per assignment."""

MakeEngine = Callable[[Sequence[ClientJob], str | None, int, int | None], ClientEngine]
"""(jobs, name, chunk, threads) -> an engine for such jobs.

name, chunk and threads are the values of the earlier engine of a resumed run.
"""


@dataclass(frozen=True)
class LocalWork:
    """Amount of a client's training in a round.

    epochs: passes over its examples; ignored if `steps` is given. batch_size: None is all of the
    client's examples. needs_two: whether the model cannot train on a single example. A single
    example at the end of a pass then joins the batch before it; a client with a single example has
    no update. partial: whether clients send unfinished work at a deadline.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 10
    needs_two: bool = False
    partial: bool = False

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

    def too_few(self, indices: Tensor) -> bool:
        """Return whether a client has too few examples to train."""
        return self.needs_two and indices.numel() < 2


@dataclass(frozen=True)
class ClientData:
    """Training data of the clients.

    Args:
        examples: the examples of all clients.
        parts: the examples of each client, as indices.
        names: names of the clients; None if the data have none.
        present: returns the available ones among n examples at a time; None is all.
    """

    examples: Examples
    parts: Sequence[Tensor]
    names: Sequence[str] | None = None
    present: Callable[[int, float], Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.parts) <= FEW:
            object.__setattr__(self, "parts", list(self.parts))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of examples of each client."""
        if isinstance(self.parts, ClientParts):
            found: list[int] = self.parts.sizes.tolist()
            return found
        return [len(part) for part in self.parts]

    def indices(self, client: int, now: float) -> Tensor:
        """Return the examples of a client at this time, as indices."""
        own = self.parts[client]
        return own if self.present is None else own[self.present(len(own), now)]

    def name(self, client: int) -> str | None:
        """Return the label of a client in messages; None if the data have no names."""
        return None if self.names is None else client_label(client, self.names)


@dataclass(frozen=True)
class LocalTraining:
    """Local training of the clients: the jobs of their assignments.

    Args:
        data: the clients' examples.
        work: amount of training in a round.
        algorithm: its client hooks are called.
        lr_schedule: the task's learning rate schedule.
        seed: of the run.
    """

    data: ClientData
    work: LocalWork
    algorithm: Algorithm
    lr_schedule: LRSchedule | None
    seed: int

    # Most clients do the same amount of work, in every round.

    @cached_property
    def cost(self) -> Callable[[int, int, float | None], AssignmentCost]:
        """(examples, bytes up, most) -> the cost of an assignment of a client with such data."""
        return lru_cache(maxsize=FEW)(self._cost)

    @cached_property
    def _known_steps(self) -> Callable[[int], int]:
        return lru_cache(maxsize=FEW)(self.work.steps_of)

    def _cost(self, examples: int, up: int, most: float | None) -> AssignmentCost:
        passes = self.algorithm.passes
        steps = self.work.steps_of(examples)
        if most is not None:
            # In whole steps; an algorithm may compute several gradients of each example.
            in_time = int(most // (passes * self.work.batch(examples))) if most > 0 else 1
            steps = max(1, min(steps, in_time))
        return AssignmentCost(steps, passes * self.work.examples_in(steps, examples), up)

    def jobs(self, order: ClientOrder, memory: ClientMemory | None) -> list[ClientJob]:
        """Return the engine's jobs for an assignment: FedAvg's job, as the algorithm changes it.

        memory: the client's state. The list is empty for a client that has too few examples to
        train.
        """
        one = order.assignment
        indices = self.data.indices(one.client, order.began)
        if self.work.too_few(indices):
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
            joins=self.work.needs_two,
            name=self.data.name(one.client),
        )
        return self.algorithm.jobs(job, one, memory)

    def fine_tuning(
        self, client: int, model: PersonalisedModel, round: int, now: float, epochs: int
    ) -> ClientJob:
        """Return the job that fine-tunes a model on the client's present data."""
        indices = self.data.indices(client, now)
        steps = epochs * self.work.per_epoch(len(indices))
        assert model.buffers is not None
        return ClientJob(
            client=client,
            round=round,
            indices=indices,
            weights=model.weights,
            buffers=model.buffers,
            first_step=round * steps,
            steps=steps,
            turn=round,
            lr_factor=self._factor(max(round - 1, 0)),  # of the last round
            joins=self.work.needs_two,
            name=self.data.name(client),
        )

    def _factor(self, round: int) -> float:
        return 1.0 if self.lr_schedule is None else factor_at(self.lr_schedule, round)

    def steps(self, order: ClientOrder, coins: Secret | None) -> list[Tensor]:
        """Return the examples of each step of FedAvg's job, as indices of the training data.

        coins: secret source of Poisson sampling; None without it.
        """
        one = order.assignment
        own = self.data.indices(one.client, order.began)
        count = len(own)
        steps = range(order.work.steps)
        size = self.work.batch_size
        if coins is not None:
            drawn = PoissonBatches(count, size, coins, one.client, one.turn)
            return [own[drawn.at(step)] for step in steps]
        batches = Batches(count, size, self.seed, one.client, self.work.needs_two)
        first = one.turn * self._known_steps(count)
        return [own[batches.at(first + step)] for step in steps]


class RunEngine:
    """Engine of a run, chosen at the first jobs for the rest of the run.

    A resumed run uses the same engine, because the cohort size depends on the number of these jobs.

    Args:
        make: makes the engine.
        threads: thread limit of the engine's operators.
    """

    def __init__(self, make: MakeEngine, threads: int | None = None) -> None:
        self._make = make
        self.made: ClientEngine | None = None
        """The engine, once chosen."""
        self.look: Callable[[], None] | None = None
        """Called between batches by engines that train one client after another.

        An exception of the callback ends the training.
        """
        self.name: str | None = None
        self.why = ""
        """Reason for the choice of the engine, in a line."""
        self.chunk = 0
        """Number of jobs per process and message; 0 without processes."""
        self.threads = threads

    def at(self, jobs: Sequence[ClientJob]) -> ClientEngine:
        """Return the engine, which is chosen by these jobs if they are the first."""
        if self.made is None:
            again = self.name is not None
            engine = self._make(jobs, self.name, self.chunk, self.threads)
            self.made = engine
            self.name = engine.name
            self.why = self.why if again else engine.why
            self.chunk = engine.chunk
            self.threads = engine.threads
        self.made.look = self.look
        return self.made

    def close(self) -> None:
        """End the engine's processes, if there are any."""
        if self.made is not None:
            self.made.close()
            self.made = None

    def state(self) -> dict[str, Any]:
        """Return the engine's settings, as a tree for checkpoints."""
        return {
            "name": self.name,
            "why": self.why,
            "chunk": self.chunk,
            "threads": self.threads,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.name = state["name"]
        self.why = state["why"]
        self.chunk = state["chunk"]
        self.threads = state["threads"]
