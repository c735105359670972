"""What a strategy is: how the learning is divided. And what it may ask of the place where it runs.

A strategy is a frozen dataclass whose fields are its paper's hyperparameters. It makes a *learner*:
the strategy at work on one rank, advancing one step or one round at a time. `dure.train` drives
every learner with the same loop, which is why every system is measured, stopped, checkpointed and
resumed on the same terms.

A *place* is what a world gives to the one that runs in it. Worlds know no system and systems know
no world; they meet in `dure.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.partition import Description
from dure.fleet.conditions import Conditions
from dure.protocol.carrier import Carrier, Clients
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.record.meter import Meter
from dure.record.trace import Trace

Kind = Literal["ranks", "threads", "clients"]
"""Three families: SPMD ranks over a group; one program with worker threads, on one device or
several; a server with clients."""

STOP = 1
CHECKPOINT = 2
INTERRUPT = 4
"""Wishes of rank 0: to end, to write a checkpoint; to end because the user, or the launcher, asked
for it. They are bits that travel with a step's message, so that all ranks do the same after it."""


class Progress(NamedTuple):
    """What one step or round did: the same on every rank."""

    loss: float | None
    """Mean training loss over the joint batch, or over the examples of the round; None where there
    were none."""
    samples: int
    """Training examples processed, by all workers together."""
    wish: int = 0
    """The wish that rank 0 gave to this step."""
    numbers: Mapping[str, float] | None = None
    """What else the strategy says about the step, by name, as residuals; for the history and the
    summary."""


class Learner(Protocol):
    """A strategy at work on one rank."""

    unit: str
    """What it counts: "step" or "round"."""

    @property
    def units_per_epoch(self) -> int:
        """Steps, or rounds as they are now, in a pass over the training data: the default interval
        of evaluations."""

    where: str
    """Who this is, for errors: "rank 1" or "server"."""

    def flops_per_step(self) -> float:
        """Floating-point operations of one optimizer step here; small steps get one thread
        (`dure.machine.threads`)."""

    def advance(self, wish: int) -> Progress:
        """Does one step or round. Rank 0 says its `wish`; the others give 0."""

    def evaluate(self) -> dict[str, float]:
        """test_loss and test_<metric> of the model as it is, the same on every rank; empty without
        test data."""

    def weights(self) -> dict[str, Tensor]:
        """The whole model's state_dict, on rank 0."""

    def state(self) -> dict[str, Any]:
        """All else that it needs to go on: optimizer state, position, and "buffers"
        (`passing_buffers`)."""

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Goes on from `weights` and `state`."""

    def meters(self) -> Sequence[Meter]:
        """The meters of the workers that live here: this rank's, or the server's and its
        clients'."""


@runtime_checkable
class Parted(Protocol):
    """A learner whose ranks hold different things, as optimizers that are not kept equal. The
    driver gathers them.

    `resizes = True` on it says that `restore` makes sense of the parts of another number of ranks
    as well.
    """

    def part(self) -> Any:
        """What only this rank holds, as a tree for checkpoints: `restore` finds all ranks' in
        state["parts"]."""


@runtime_checkable
class Telling(Protocol):
    """A learner that has something to say of what lies where, for the report. The driver gathers it
    at the end."""

    def facts(self) -> dict[str, Any]:
        """What this rank holds, as JSON; summary.json has all ranks' under "facts". It speaks with
        no other rank."""


Value = TypeVar("Value")


@dataclass
class Place:
    """What a world gives to a program that runs in it.

    group: the ranks, and this one among them. trace: this process's timeline. report: sends an
    event to whoever watches the run (rank 0 only). interrupted: whether the user asked to stop
    (rank 0 only). clock_offset: seconds to add to this machine's clock to get rank 0's. kind: of
    the world. devices: where this program computes, one for each of its workers; the first is its
    own. ending: what has to end with the run, as threads. conditions, carrier: of a federation:
    what its clients are like, and, given the clients' side and the seed, who carries messages
    between a coordinator and them.
    """

    group: Group
    trace: Trace = field(default_factory=Trace)
    report: Callable[[dict[str, Any]], None] = lambda event: None
    interrupted: Callable[[], bool] = lambda: False
    clock_offset: float = 0.0
    kind: Kind = "ranks"
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    ending: ExitStack = field(default_factory=ExitStack)
    conditions: Conditions | None = None
    carrier: Callable[[Clients, int], Carrier] | None = None


class World(Protocol):
    """Who takes part, and how they reach each other."""

    name: ClassVar[str]
    kind: ClassVar[Kind]

    @property
    def leads(self) -> bool:
        """Whether this process writes the run folder and talks to the user."""

    @property
    def workers(self) -> int | None:
        """How many ranks or threads there are; None where the strategy says how many clients."""

    def describe(self) -> str:
        """For tables: "2 processes"."""

    def run(
        self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        """Runs `program` on every rank and returns what it returned on rank 0 (or on this rank,
        where each rank called `run` itself). Raises the first failure, when all ranks have
        ended."""


class Strategy(Protocol):
    """How the learning is divided: a frozen dataclass, made by the user.

    It lives in worlds of its `kind`. One that lives in others as well has a class variable `also`,
    of the kind to its label there (`dwellings`), and may have a method `check_in(world)` that
    raises ValueError where a field makes no sense in such a world; one of clients a method
    `check_under(task, conditions)` that does so where the conditions do not fit; any a method
    `check_model(model, workers)` that does so for a model that it cannot train. One whose runs do
    not repeat themselves to the last bit has `deterministic = False`.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    unit: ClassVar[str]

    @property
    def label(self) -> str:
        """For tables: the name, and the fields that matter."""

    def check(self, task: Task, workers: int | None) -> None:
        """Raises ValueError, before any work, if the fields do not fit each other, the task or the
        workers."""

    def division(self, task: Task, seed: int) -> Description | None:
        """How the training data lie with their owners, for the report; None where nobody owns a
        part."""

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        """The strategy at work: the model made under `seed`, ready for its first step."""


def dwellings(strategy: Strategy | type[Strategy]) -> tuple[Kind, ...]:
    """The kinds of worlds in which a strategy lives; its home is the first."""
    return strategy.kind, *getattr(strategy, "also", {})


def label_in(strategy: Strategy, kind: Kind) -> str:
    """What tables call a strategy in a world of `kind`."""
    return str(getattr(strategy, "also", {}).get(kind, strategy.label))


def check_in(strategy: Strategy, world: World) -> None:
    """Raises ValueError if the strategy and its fields do not fit the world."""
    check = getattr(strategy, "check_in", None)
    if check is not None:
        check(world)


def check_model(strategy: Strategy, model: nn.Module, workers: int | None) -> None:
    """Raises ValueError if the strategy cannot train the model."""
    check = getattr(strategy, "check_model", None)
    if check is not None:
        check(model, workers)


def check_under(strategy: Strategy, task: Task, conditions: Conditions) -> None:
    """Raises ValueError if the conditions of clients do not fit the strategy or the task."""
    check = getattr(strategy, "check_under", None)
    if check is not None:
        check(task, conditions)


def seeded_model(task: Task, seed: int) -> nn.Module:
    """A fresh model under the run's seed: the same weights on every rank and for every strategy."""
    before = generators_state()
    seed_generators(seed, "model", everything=True)
    model = task.model()
    restore_generators(before)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the task's model function returned a {type(model).__name__}, not an nn.Module"
        )
    return model


def examples_for(model: nn.Module, task: Task) -> tuple[Examples, Examples | None]:
    """(train, test) with floating-point tensors in the dtype of the model's parameters."""
    dtype = next(
        (p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )
    return task.train.to(dtype), None if task.test is None else task.test.to(dtype)
