"""What all federated strategies have in common: their fields, and the learner that runs them.

    repeat: the coordinator asks clients; a carrier takes the assignments to them and their updates
            back; the coordinator makes a new model of the updates

A subclass is an algorithm: it adds its hyperparameters and says what its clients and its server do
(`algorithm`), when the server asks and combines (`pacing`), and how it moves the model
(`optimizer`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.contracts.strategy import (
    Kind,
    Learner,
    Place,
    Progress,
    Strategy,
    another,
    examples_for,
)
from dure.contracts.task import Task
from dure.data import partition
from dure.data.batches import check_batch_size
from dure.data.partition import IID, Description, NaturalKey, Partition, Parts, describe
from dure.errors import LossNotFiniteError
from dure.federated import aggregate
from dure.federated.aggregate import Aggregator, Mean
from dure.federated.algorithm import Algorithm, Start
from dure.federated.client.clients import Clients, LocalWork, check_poison, poisoned
from dure.federated.client.personal import Personal
from dure.federated.engines.choose import Setting, check_engine, engine_for
from dure.federated.engines.job import Engine
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.server import sampling
from dure.federated.server.coordinator import Coordinator, Result
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.log import Log
from dure.federated.server.pacing import Pacing, Rounds
from dure.federated.server.sampling import Selection, Uniform, clients_per_round
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.fleet.arrival import Still
from dure.fleet.attacks import Backdoor, NoAttack
from dure.fleet.conditions import Conditions
from dure.fleet.liars import count, liars
from dure.machine.threads import flops_per_step
from dure.protocol.carrier import Flight
from dure.randomness.seeds import generator
from dure.record.meter import Meter
from dure.settings import parse_fields
from dure.tasks.evaluation import evaluate, ratio
from dure.tensors.buffers import Buffers, load_passing_buffers, load_weights, passing_buffers
from dure.tensors.flat import FlatParameters

MOST_METERS = 1_000
"""With more clients than this, one meter counts for all of them."""


@dataclass(frozen=True)
class Federated(Strategy):
    """Clients train where their data are; a server combines what they learned.

    partition, selection and aggregate may be given as text, as the command line takes them.

    Args:
        clients: K; with the partition natural-key None is one client a key.
        fraction: C, the share of the clients that takes part in a round, or is at work at any time,
            in (0, 1].
        local_epochs: E, passes of a client over its data in a round.
        local_steps: steps of a client in a round instead of epochs.
        batch_size: B, of a client's step; None is all of its data.
        partition: how examples are divided over clients: iid, label-shards:2, dirichlet:0.5,
            quantity-skew:1, or natural-key.
        selection: how a round chooses its clients: uniform, weighted, poisson; uniform:1.3:60:8
            asks 1.3 times as many as it needs, and ends after 60 s if 8 have answered.
        aggregate: how updates become one: mean, median, trimmed-mean:0.2, krum:2, bulyan:2,
            geometric-median, geometric-median-of-means:10, rfa, centred-clipping:10;
            clipped:1/mean, bucketing:2/krum:2.
        held_out: the share of each client's data that it does not train on, for measuring models
            client by client.
        fine_tune: epochs for which a client trains the global model further before its own is
        measured.
    """

    clients: int | None = 10
    fraction: float = 1.0
    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int | None = 10
    partition: Partition = field(default_factory=IID)
    selection: Selection = field(default_factory=Uniform)
    aggregate: Aggregator = field(default_factory=Mean)
    held_out: float = 0.0
    fine_tune: int = 0

    name: ClassVar[str]
    title: ClassVar[str]
    kind: ClassVar[Kind] = "clients"
    unit: ClassVar[str] = "round"
    sends_partial_work: ClassVar[bool] = False
    letters: ClassVar[Mapping[str, str]] = {
        "clients": "K",
        "fraction": "C",
        "local_epochs": "E",
        "local_steps": "steps",
        "batch_size": "B",
    }

    def __post_init__(self) -> None:
        parse_fields(
            self,
            {
                "partition": partition.parse,
                "selection": sampling.parse,
                "aggregate": aggregate.parse,
            },
        )

    # What an algorithm says

    def algorithm(self, start: Start) -> Algorithm:
        """The hooks of the algorithm."""
        return Algorithm()

    def pacing(self, clients: int) -> Pacing:
        """When the server asks and combines."""
        return Rounds(self.fraction, self.selection)

    def optimizer(self) -> ServerOptimizer:
        """How the server moves the model. Raises ValueError for values that make no sense."""
        return ServerOptimizer()

    def rule(self) -> Aggregator:
        """How updates become one."""
        return self.aggregate

    def check_task(self, task: Task) -> None:
        """Raises ValueError if the algorithm cannot train the task."""

    def engine(self, setting: Setting) -> Engine:
        """Who computes what clients are asked. Raises ValueError for a wanted engine that
        cannot."""
        return engine_for(*setting)

    def check_engine(self, task: Task, wanted: str, model: nn.Module | None = None) -> None:
        """Raises ValueError for an engine, asked for by name, that cannot compute the task.

        model: the task's, where there is one already.
        """
        check_engine(task, wanted, model)

    # What they share

    @property
    def label(self) -> str:
        default = type(self)()
        changed = [
            one.name
            for one in fields(self)
            if getattr(self, one.name) != getattr(default, one.name)
        ]
        shown = [
            f"{self.letters.get(name, name.replace('_', ' '))}={getattr(self, name)}"
            for name in changed
            if name not in ("partition", "aggregate", "selection")
            and not (name == "clients" and self.clients is None)
        ]
        texts = [str(getattr(self, name)) for name in ("selection", "aggregate") if name in changed]
        return " ".join([self.title, str(self.partition), *texts, *shown])

    def work(self) -> LocalWork:
        return LocalWork(self.local_epochs, self.local_steps, self.batch_size)

    def check(self, task: Task, workers: int | None) -> None:
        check_batch_size(self.batch_size)
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"fraction is {self.fraction}, but a share of the clients is in (0, 1]"
            )
        if self.clients is not None and self.clients < 1:
            raise ValueError(f"clients is {self.clients}, but a federation has at least one")
        if self.clients is None and not isinstance(self.partition, NaturalKey):
            raise ValueError(
                "clients is not given; only the partition natural-key knows how many there are"
            )
        if self.local_epochs < 1:
            raise ValueError(
                f"local_epochs is {self.local_epochs}, but a client makes at least one pass"
            )
        if self.local_steps is not None and self.local_steps < 1:
            raise ValueError(
                f"local_steps is {self.local_steps}, but a client makes at least one step"
            )
        if not 0 <= self.held_out < 1:
            raise ValueError(
                f"held_out is {self.held_out}, but a share of each client's data is in [0, 1)"
            )
        if self.fine_tune < 0:
            raise ValueError(f"fine_tune is {self.fine_tune}, but it counts epochs: 0 or more")
        if self.fine_tune and not self.held_out:
            raise ValueError(
                "fine_tune measures clients' own models, which needs data that are held_out: give "
                "0.2"
            )
        examples = len(task.train)
        if self.clients is not None and self.clients > examples:
            raise ValueError(
                f"{self.clients} clients are more than the {examples} training examples"
            )
        self.optimizer()
        self.check_task(task)
        clients = self._count(task)
        if clients is not None:  # without keys it is the partition that refuses
            self.rule().check(self._updates(clients))
            pacing = self.pacing(clients)
            if isinstance(pacing, Rounds):
                pacing.check(clients)

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Raises ValueError for a parameter of which there is no mean."""
        for name, parameter in model.named_parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise ValueError(
                    f"parameter {name} is of {parameter.dtype}, which has no mean: make it a buffer"
                )

    def check_under(self, task: Task, model: nn.Module, conditions: Conditions) -> None:
        """Raises ValueError for liars that there cannot be, and an engine that cannot compute the
        task."""
        clients, attack, attackers = self._count(task), conditions.attack, conditions.attackers
        if clients is not None and attackers and not count(clients, attackers):
            raise ValueError(
                f"attackers is {attackers}, but this share of {clients} clients is none: give a "
                f"larger"
            )
        if attack.poisons:
            check_poison(task.train, attack)
        self.check_engine(task, conditions.engine, model)

    def _count(self, task: Task) -> int | None:
        """How many clients there are, where that is known before the data are divided."""
        keys = task.train.keys
        return (
            self.clients
            if self.clients is not None
            else len(set(keys))
            if keys is not None
            else None
        )

    def _updates(self, clients: int) -> int:
        """Updates that usually make a new model."""
        pacing = self.pacing(clients)
        return (
            clients_per_round(clients, self.fraction) if isinstance(pacing, Rounds) else pacing.size
        )

    def divide(self, task: Task, seed: int) -> Parts:
        """The examples of each client. Raises ValueError if the partition does not fit the data."""
        train = task.train
        return self.partition.divide(self.clients, len(train), train.labels(), train.keys, seed)

    def division(self, task: Task, seed: int) -> Description | None:
        return describe(
            self.partition, self.divide(task, seed), task.train.labels(), task.train.classes
        )

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return FederatedLearner(task, place, seed, self)


class FederatedLearner(Learner):
    """The server's side, the clients' side, and the carrier between them."""

    unit = "round"
    where = "server"

    def __init__(self, task: Task, place: Place, seed: int, strategy: Federated) -> None:
        assert place.carrier is not None
        assert place.conditions is not None
        self.task, self.place, self.seed, self.strategy = task, place, seed, strategy
        conditions: Conditions = place.conditions
        self.model = place.model(task, seed)
        self.flat, self.buffers = FlatParameters(self.model), Buffers(self.model)
        examples, self.test_examples = examples_for(self.model, task)
        own, held_out = _held_out(strategy.divide(task, seed), strategy.held_out, seed)
        attack = None if isinstance(conditions.attack, NoAttack) else conditions.attack
        lying = partial(_liars, len(own), conditions.attackers, seed, conditions.attackers_change)
        self.personal = Personal(task, self.model, examples, held_out, seed, strategy.fine_tune)
        if attack is not None and attack.poisons:
            examples, own = poisoned(examples, own, lying(0), attack)
        weights = self.flat.copy()
        pacing = strategy.pacing(len(own))
        self.algorithm = strategy.algorithm(
            Start(self.model, weights, len(own), _learning_rate(task, self.model))
        )
        answers = type(self.algorithm).answer is Algorithm.answer
        sums = (
            answers and attack is None and type(strategy.rule()) is Mean
        )  # nobody looks at single updates
        self.clients = Clients(
            own,
            strategy.work(),
            self.algorithm,
            lambda jobs, chosen, chunk, threads: strategy.engine(
                Setting(
                    *(
                        task,
                        another(self.model, task, seed),
                        examples,
                        strategy.batch_size,
                        seed,
                        jobs,
                    ),
                    *(
                        conditions.processes,
                        chosen or conditions.engine,
                        pacing.synchronous,
                        sums,
                        chunk,
                        threads,
                    ),
                )
            ),
            seed,
            None if isinstance(conditions.arrival, Still) else conditions.arrival.present,
            attack,
            lying,
            strategy.sends_partial_work,
            task.lr_schedule,
            _threads(conditions.processes),
        )
        self.carrier = place.carrier(self.clients, seed)
        buffers = [buffer.clone() for buffer in self.buffers.of(self.model)]
        shared = self.algorithm.shared(weights)
        model = GlobalModel(shared, buffers, strategy.rule(), strategy.optimizer())
        self.coordinator = Coordinator(model, pacing, self.algorithm, self.clients.sizes, seed)
        asked = pacing.asked(seed, 0, len(own)) if isinstance(pacing, Rounds) else pacing.size
        self.units_per_epoch = 1 if isinstance(pacing, Rounds) else max(1, round(len(own) / asked))
        self.server = place.group.meter
        self.server.name = "server"
        self.counted = _meters(len(own))
        self.log = Log(None if attack is None else lying)
        place.ending.callback(self.clients.close)

    def flops_per_step(self) -> float:
        typical = sum(self.clients.sizes) / len(self.clients.sizes)
        batch = min(self.strategy.batch_size or typical, typical)
        return flops_per_step(self.model, self.test_examples or self.personal.examples, batch)

    def advance(self, wish: int) -> Progress:
        """One new global model: assignments out, local training, updates back, the updates
        combined."""
        coordinator, round = self.coordinator, self.coordinator.round
        before = coordinator.model.weights
        started = time.perf_counter()
        ways_back = [one.mark() for one in (coordinator, self.carrier, self.clients)]
        try:
            combine = self.carrier.carry(coordinator)
            for update in self.carrier.updates(coordinator, combine.tickets):
                self.log.saw(update)
                checked = (
                    self.clients.attack is None and not update.buffers
                )  # the engine has seen to its weights
                coordinator.fold(update, finite=checked)
        except LossNotFiniteError:  # what is kept then is the state before the round
            for back in ways_back:
                back()
            raise
        trained = time.perf_counter()
        self.server.compute("local training", started, trained, round + 1)
        result = coordinator.finish(self.carrier.now)
        self.clients.keep([ticket for ticket in combine.tickets if ticket not in result.refused])
        self.clients.forget(list(result.refused))
        self.server.compute("aggregate", trained, time.perf_counter(), round + 1)
        flown = self.carrier.flown
        self.carrier.flown = []
        self._count(flown)
        self.log.flew(flown, result, round, before, coordinator.model.weights)
        return Progress(result.loss, result.samples, wish, self._numbers(flown, result))

    def _count(self, flown: list[Flight]) -> None:
        """Bytes of the server and of the clients, and the clients' seconds, which are their
        devices'."""
        for flight in flown:
            self.server.sent(flight.down)
            meter = self.counted[flight.client if len(self.counted) > 1 else 0]
            meter.received(flight.down)
            if flight.up:
                meter.sent(flight.up)
                self.server.received(flight.up)
            meter.counters.compute_seconds += flight.compute_seconds
            meter.counters.communication_seconds += flight.transfer_seconds

    def _numbers(self, flown: list[Flight], result: Result) -> dict[str, float]:
        outcomes = [flight.outcome for flight in flown]
        staleness = result.staleness
        return {
            "virtual_seconds": self.carrier.now,
            "updates": float(len(result.clients)),
            "late": float(outcomes.count("late")),
            "failed": float(sum(one not in ("late", "accepted") for one in outcomes)),
            "refused": float(len(result.refused)),
            "staleness": sum(staleness) / len(staleness) if staleness else 0.0,
        }

    def _load_global(self) -> None:
        coordinator = self.coordinator
        self.flat.load(self.algorithm.whole(coordinator.model.weights, self.clients.memories))
        self.buffers.load(self.model, coordinator.model.buffers)

    def evaluate(self) -> dict[str, float]:
        self._load_global()
        return {
            **evaluate(
                self.task, self.model, self.test_examples, self.place.group, self.coordinator.round
            ),
            **self._opened(),
            **self.personal.measured(
                self.algorithm, self.coordinator.model, self.clients, self.carrier.now
            ),
        }

    @torch.no_grad()
    def _opened(self) -> dict[str, float]:
        """The share of the test examples of other classes that a backdoor's trigger turns to its
        target."""
        attack, examples = self.clients.attack, self.test_examples
        if not isinstance(attack, Backdoor) or examples is None:
            return {}
        self.model.eval()
        turned, of = 0, 0
        for part in torch.split(torch.arange(len(examples)), self.task.eval_batch_size):
            inputs, targets = examples.batch(part)
            some = attack.turned(self.model(attack.triggered(inputs)), targets)
            turned, of = turned + some[0], of + some[1]
        self.model.train()
        return {"test_backdoor": ratio(turned, of)}

    def weights(self) -> dict[str, Tensor]:
        self._load_global()
        return dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        self._load_global()
        return {
            "coordinator": self.coordinator.state(),
            "carrier": self.carrier.state(),
            "clients": self.clients.state(),
            "log": self.log.state(),
            "measured": self.personal.latest,
            "engine": [
                self.clients.chosen,
                self.clients.why,
                self.clients.chunk,
                self.clients.threads,
            ],
            "buffers": passing_buffers(self.model),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_passing_buffers(self.model, state["buffers"])
        self.coordinator.restore(state["coordinator"])
        self.carrier.restore(state["carrier"])
        self.clients.restore(state["clients"])
        self.clients.chosen, self.clients.why, self.clients.chunk, self.clients.threads = state[
            "engine"
        ]
        self.log.restore(state["log"])
        self.personal.latest = state.get("measured", {})

    def facts(self) -> dict[str, Any]:
        """Who took part when, and how it went, for the report."""
        return {
            "engine": self.clients.chosen,
            "why": self.clients.why,
            **self.log.facts(),
            **self.personal.facts(),
        }

    def meters(self) -> Sequence[Meter]:
        return [self.server, *self.counted]


def _liars(clients: int, attackers: float, seed: int, change: bool, turn: int) -> Collection[int]:
    """Who lies in a round: the same all along, or others in every round."""
    return liars(clients, attackers, seed, turn if change else None)


def _threads(processes: int | None) -> int:
    """That steps of many clients may have: all that torch has before a run has fewer for the steps
    of one client."""
    return torch.get_num_threads() if processes is None else min(processes, torch.get_num_threads())


def _meters(clients: int) -> list[Meter]:
    if clients <= MOST_METERS:
        return [Meter(f"client {client}") for client in range(clients)]
    together = Meter(f"{clients} clients")
    together.stands_for = clients
    return [together]


def _learning_rate(task: Task, model: nn.Module) -> float:
    return float(
        optimizer_of(task, list(model.parameters())).param_groups[0].get("lr", float("nan"))
    )


def _held_out(
    parts: Sequence[Tensor], share: float, seed: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(what clients train on, what they keep for measuring): the share of each that comes last in
    an order of its own; a client that has one example alone trains on it."""
    if not share:
        return parts, []
    own, kept = [], []
    for client, part in enumerate(parts):
        count = min(max(round(share * len(part)), 1), len(part) - 1)
        order = torch.randperm(len(part), generator=generator(seed, "held out", client))
        own.append(part[order[: len(part) - count].sort().values])
        kept.append(part[order[len(part) - count :].sort().values])
    return own, kept
