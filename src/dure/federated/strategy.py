"""Base class of federated strategies: fields, defaults and checks.

`dure.federated.builders` builds the server and the clients of a strategy.

A subclass is an algorithm: it adds its hyperparameters, the hooks of clients and server
(`algorithm`), the pacing of requests and models (`pacing`), and the step of the model
(`optimizer`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from torch import Tensor, nn

from dure.arguments import at_least, between, check_ranges
from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import Learner, Proof
from dure.contracts.lr_schedule import check_counts_rounds
from dure.contracts.stop import Stop
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import Kind, RankContext, World
from dure.data import partition
from dure.data.batches import check_batch_size
from dure.data.client_part import HeldOutOrder, split_held_out
from dure.data.partition import IID, ClientParts, Partition, PartitionDescription, describe
from dure.data.sampling import SEPARATE_SAMPLING
from dure.federated import aggregate, builders
from dure.federated.adapters import check_adapter, with_adapter
from dure.federated.aggregate import Aggregator, Mean
from dure.federated.algorithm import Algorithm, AlgorithmInputs, algorithm_inputs_of
from dure.federated.client.jobs import LocalWork
from dure.federated.client.poisoning import check_poison
from dure.federated.engines.engine_choice import (
    EngineInputs,
    check_engine,
    check_objective,
    check_place,
    engine_for,
)
from dure.federated.engines.job import ClientEngine
from dure.federated.engines.noised import check_noised
from dure.federated.engines.trainer import check_trained
from dure.federated.privacy.example_level import check_example_level
from dure.federated.privacy.privacy_settings import NOTHING, Privacy, privacy_of
from dure.federated.privacy.secure_aggregation.checks import (
    check_conditions,
    check_groups,
    check_measuring,
    check_pacing,
    check_rule,
    check_user,
)
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.privacy.user_level.checks import (
    check_budget,
    check_user_level,
    chosen_noise,
)
from dure.federated.server import sampling
from dure.federated.server.client_metrics import FAILURES, client_metric_names
from dure.federated.server.pacing import Pacing, SynchronousPacing
from dure.federated.server.sampling import PerClientPoisson, Selection, Uniform, Weighted
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.fleet.conditions import Conditions, conditions_of
from dure.fleet.malicious import attacker_count
from dure.machine.devices import device_of, device_of_model
from dure.privacy.accountant import check_delta
from dure.privacy.example_level import proven
from dure.privacy.per_example.unsupported_layers import check_layers
from dure.privacy.protection import check_installed
from dure.settings import parse_fields
from dure.tasks.batch_norm import needs_two
from dure.tensors.flat import check_no_shared_memory

if TYPE_CHECKING:
    from typing_extensions import Self


DIVIDED_MODEL_WITHOUT_EMA = (
    "the average is of the whole model, and a part of it belongs to each client"
)
"""Reason why an algorithm that divides the model has no ema."""


@dataclass(frozen=True)
class Federated(Strategy):
    """Clients train on their own data; a server combines their updates.

    partition, selection and aggregate may be given as text, as on the command line.

    Args:
        clients: K; None is 10, or one client per key with the partition natural-key.
        fraction: C, the share of the clients that takes part in a round, or that works at any time
            without rounds, in (0, 1].
        local_epochs: E, passes of a client over its data in a round.
        local_steps: steps of a client in a round instead of epochs.
        batch_size: B, of a client's step; None is all of its data.
        partition: division of the examples over clients: iid, label-shards:2, dirichlet:0.5,
            quantity-skew:1, feature-skew:0.8, blocks:2, or natural-key.
        selection: choice of a round's clients: uniform, weighted, poisson; uniform:1.3:60:8 asks
            1.3 times as many clients as needed, and ends after 60 s if 8 have answered.
        aggregate: rule that combines updates: mean, median, trimmed-mean:0.2, krum:2, bulyan:2,
            geometric-median, geometric-median-of-means:10, rfa, centred-clipping:10;
            clipped:1/mean, bucketing:2/krum:2.
        held_out: share of each client's data that is held out from training, to measure models
            client by client; 0 measures on the test data that carry the client's key, if there are
            any.
        fine_tune: epochs for which a client trains the global model further before its personalised
            model is measured.
        held_out_order: choice of the held-out examples: random, or newest, the last examples of
            each client.
        freeze_at: round whose model is measured on the newest data beside every later model, for
            data that come and go.
        privacy: protection of updates and examples: secure-aggregation, user-level:1:1.1,
            dp-sgd:1:1.1, or several with / between them; none by default.
        epsilon: budget of differential privacy: the run ends before it exceeds the budget. If the
            privacy names no noise, the least noise that stays within the budget for all rounds of
            the run.
        delta: probability that the epsilon does not hold; well below 1 / clients.
    """

    clients: int | None = field(default=None, metadata=at_least(1))
    fraction: float = field(default=1.0, metadata=between(0, 1, "(]"))
    local_epochs: int = field(default=1, metadata=at_least(1))
    local_steps: int | None = field(default=None, metadata=at_least(1))
    batch_size: int | None = 10
    partition: Partition = field(default_factory=IID)
    selection: Selection = field(default_factory=Uniform)
    aggregate: Aggregator = field(default_factory=Mean)
    held_out: float = field(default=0.0, metadata=between(0, 1, "[)"))
    fine_tune: int = field(default=0, metadata=at_least(0))
    held_out_order: HeldOutOrder = "random"
    freeze_at: int | None = field(default=None, metadata=at_least(0))
    privacy: Privacy = NOTHING
    epsilon: float | None = None
    delta: float = 1e-5

    name: ClassVar[str]
    title: ClassVar[str]
    traits: ClassVar[Traits] = Traits(
        kind="clients",
        unit="round",
        trains_with=ALL,
        samples=SEPARATE_SAMPLING,
        without=frozenset({"server_examples_per_second"}),
        follows_model=True,
        # In older checkpoints the server and its clients were a single state.
        oldest_checkpoint=2,
    )
    sends_partial_work: ClassVar[bool] = False
    trains_by_steps: ClassVar[bool] = True
    """Whether clients train by steps of the task's optimizer, which a trainer can make."""
    noises_steps: ClassVar[bool] = True
    """Whether the clients' local training may be DP-SGD."""

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
        # The data give the number of natural clients; otherwise the user has to.
        if self.clients is None:
            object.__setattr__(self, "clients", self.partition.clients_by_default)
        # A single protection or a tuple of several becomes a `Privacy`.
        object.__setattr__(self, "privacy", privacy_of(self.privacy))
        # The guarantee of user-level privacy assumes Poisson sampling; other selections are
        # refused.
        if self.privacy.user is not None and self.selection == Uniform():
            object.__setattr__(self, "selection", PerClientPoisson())

    # Hooks for subclasses

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        """Return the hooks of the algorithm."""
        return Algorithm()

    def pacing(self, clients: int) -> Pacing:
        """Return the pacing: when the server sends requests and when it combines updates."""
        return SynchronousPacing(self.fraction, self.selection)

    def optimizer(self) -> ServerOptimizer:
        """Return the optimizer that moves the model; raise ValueError for invalid values."""
        return ServerOptimizer()

    def rule(self) -> Aggregator:
        """Return the rule that combines updates."""
        return self.aggregate

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        """Return why a part of learning is impossible: dp-sgd needs per-example gradients."""
        if self.privacy.example is not None and feature in ("precision", "compile"):
            return "dp-sgd computes per-example gradients in full precision"
        return super().cannot(feature, kind)

    def check_task(self, task: Task) -> None:
        """Raise ValueError if the algorithm cannot train the task."""

    def engine(self, setting: EngineInputs) -> ClientEngine:
        """Return the engine that computes the clients' jobs.

        Raises ValueError if the requested engine cannot compute them.
        """
        return engine_for(setting)

    def check_engine(self, task: Task, wanted: str, model: nn.Module | None = None) -> None:
        """Raise ValueError if an engine requested by name cannot compute the task.

        model: the task's model, if it exists already.
        """
        if self.privacy.example is not None:
            check_noised(wanted)
        check_engine(task, wanted, model)

    # Implementation that all subclasses share

    def algorithm_for(self, task: Task, model: nn.Module, clients: int) -> Algorithm:
        """Return the algorithm for the task's model, which may have an adapter."""
        inner = self.algorithm(algorithm_inputs_of(task, model, clients))
        return with_adapter(inner, task, model)

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(
            protects=self.privacy != NOTHING,
            uses_poisson_sampling=self.privacy.example is not None,
        )

    @property
    def label(self) -> str:
        # Only fields that differ from the defaults: labels are for legends and lists.
        default = type(self)()
        changed = [
            one.name
            for one in fields(self)
            if getattr(self, one.name) != getattr(default, one.name)
        ]
        shown = [
            f"{self.letters.get(name, name.replace('_', ' '))}={getattr(self, name)}"
            for name in changed
            if name not in ("partition", "aggregate", "selection", "privacy")
            and not (name == "clients" and self.clients is None)
        ]
        texts = [
            str(getattr(self, name))
            for name in ("selection", "aggregate", "privacy")
            if name in changed
        ]
        return " ".join([self.title, str(self.partition), *texts, *shown])

    def work(self) -> LocalWork:
        return LocalWork(self.local_epochs, self.local_steps, self.batch_size)

    def planned(self, task: Task, stop: Stop) -> Self:
        user = self.privacy.user
        if self.privacy.counts_passes and self.work().steps is not None and stop.epochs:
            raise ValueError(
                "epochs cannot be counted with local_steps under secure aggregation with "
                "user-level privacy, which hide how many examples clients have processed: give "
                "rounds"
            )
        if user is None or self.epsilon is None or user.noise:
            return self
        # Check first: the search for the noise takes seconds.
        self._check_privacy()
        noise = chosen_noise(user, self, stop.rounds, self.count(task) or 1)
        return replace(self, privacy=replace(self.privacy, user=replace(user, noise=noise)))

    def _check_privacy(self) -> None:
        """Raise ValueError if clients would not get the privacy that the settings promise."""
        if self.privacy != NOTHING:
            check_installed()
        check_delta(self.delta)
        check_example_level(self.privacy, self.epsilon, self.fine_tune)
        if self.privacy.example is not None and not self.noises_steps:
            raise ValueError(
                f"dp-sgd: a client of {self.name} does not only compute the gradients of one "
                "training: use fed-avg, fed-prox or scaffold"
            )
        if self.privacy.example is not None and self.selection.asks:
            raise ValueError(
                f"dp-sgd: the selection {self.selection} asks clients for losses, which have no "
                "noise: use uniform"
            )
        user = self.privacy.user
        if user is not None:
            secure = self.privacy.secure is not None
            check_user_level(user, self, self.pacing(self.clients or 1).synchronous, secure)
        elif self.epsilon is not None and self.privacy.example is None:
            raise ValueError(
                f"epsilon {self.epsilon} is a budget of differential privacy: add --privacy "
                "user-level or dp-sgd"
            )

    def check_settings(self) -> None:
        """Raise ValueError for a field that is invalid for any task."""
        check_batch_size(self.batch_size)
        check_ranges(self)
        if self.held_out_order not in get_args(HeldOutOrder):
            raise ValueError(
                f"held_out_order is {self.held_out_order!r}, but it has to be random or newest"
            )

    def check(self, task: Task, world: World) -> None:
        self.check_settings()
        if self.fine_tune and self._measured_on(task) is None:
            raise ValueError(
                "fine_tune evaluates clients' personalised models, which needs held-out data: "
                "give held_out, such as 0.2"
            )
        examples = len(task.train)
        # A server without data cannot check this.
        if self.clients is not None and 0 < examples < self.clients:
            raise ValueError(
                f"the run has {self.clients} clients, but only {examples} training examples"
            )
        if self.selection.ranks and self.selection.samples_independently:
            raise ValueError(
                f"the selection {self.selection} ranks clients by their losses, but draws each "
                "client independently of its loss: derive it from Uniform or Weighted"
            )
        self.optimizer()
        self._check_privacy()
        if self.privacy.user is not None:
            check_budget(self.privacy.user, self, self.count(task) or 1)
        self.check_task(task)
        check_counts_rounds(task.lr_schedule)
        if task.trainer is not None:
            check_trained(self, task.trainer.of(0))
        # A rule that needs more updates than a round has is refused before any computation.
        clients = self.count(task)
        if clients is not None:  # without keys the partition raises the error
            pacing = self.pacing(clients)
            self.rule().check(pacing.updates(clients))
            pacing.check(clients)
        if self.privacy.secure is not None:
            self._check_secure(self.privacy.secure, clients)

    def _check_secure(self, secure: SecureAggregation, clients: int | None) -> None:
        """Raise ValueError if a setting needs single updates, or reveals them."""
        check_rule(secure, self.rule())
        check_user(secure, self.privacy.user)
        check_measuring(secure, self.held_out, self.fine_tune)
        if isinstance(self.selection, Weighted):
            raise ValueError(
                "the selection weighted needs each client's number of examples, which "
                f"{secure.name} hides from the server: use uniform"
            )
        if self.selection.ranks:
            raise ValueError(
                f"the selection {self.selection} needs the losses of single clients, which "
                f"{secure.name} hides from the server: use uniform"
            )
        if clients is not None:
            check_pacing(secure, self.pacing(clients), self.name)
            check_groups(secure, self.rule(), self.pacing(clients), clients)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Raise ValueError for a batch that is too small for the model, or shared memory."""
        check_no_shared_memory(model)
        if task.ema is not None and self._divides(task, model):
            raise ValueError(f"ema: {DIVIDED_MODEL_WITHOUT_EMA}; leave it out")
        if self.privacy.example is not None:
            check_layers(model)
        if task.adapter is not None:
            clients = self.count(task) or 1
            inner = self.algorithm(algorithm_inputs_of(task, model, clients))
            check_adapter(self, task, inner, clients)
        if self.privacy != NOTHING:
            self._check_hooks(task, model)
        # A server without data leaves the check to its clients.
        singly = self.batch_size == 1 and len(task.train) > 0
        if singly and needs_two(model, examples_for(task)[0]):
            raise ValueError(
                "batch_size is 1, but the model has batch norm, which cannot compute statistics "
                "of one example: use a batch_size of 2 or more"
            )
        conditions = conditions_of(world)
        if conditions is not None:
            self._check_conditions(task, model, world, conditions)

    def _check_hooks(self, task: Task, model: nn.Module) -> None:
        """Raise ValueError for hooks that need updates which the privacy hides."""
        algorithm = self.algorithm_for(task, model, self.count(task) or 1)
        own = f"{type(algorithm).__name__} of {self.name}"
        if algorithm.has_own_step and self.privacy.secure is not None:
            raise ValueError(
                f"the step of {own} needs single updates, which {self.privacy.secure.name} hides "
                "from the server: leave one of the two out"
            )
        if algorithm.has_own_step and self.privacy.user is not None:
            raise ValueError(
                f"the step of {own} needs single updates, which user-level privacy does not "
                "release: leave one of the two out"
            )
        if algorithm.has_own_objective and self.privacy.example is not None:
            raise ValueError(
                f"dp-sgd clips the gradients of the task's loss, but {own} has its own objective: "
                "leave one of the two out"
            )

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Check per-example gradient clipping on the model, with dp-sgd."""
        self.check_model(task, model, world)
        # A server without data leaves the proof to its clients.
        if self.privacy.example is None or not len(task.train):
            return None
        return proven(task, model)

    def _check_conditions(
        self, task: Task, model: nn.Module, world: World, conditions: Conditions
    ) -> None:
        """Raise ValueError for impossible attackers, or an engine that cannot compute the task."""
        clients = self.count(task)
        attack = conditions.attack
        attackers = conditions.attackers
        if clients is not None and attackers and not attacker_count(clients, attackers):
            raise ValueError(
                f"attackers is {attackers}, but this share of {clients} clients is less than one "
                "client: give a larger share"
            )
        _check_sampled(task, conditions)
        if attack.poisons:
            check_poison(task.train, attack)
        if conditions.server_examples_per_second != Conditions().server_examples_per_second:
            raise ValueError(
                "server_examples_per_second applies only to the server of split learning, which "
                "computes a part of the model: leave it out"
            )
        if self.privacy.secure is not None:
            check_conditions(self.privacy.secure, conditions)
        if self.selection.asks and conditions.transfer_budget is not None:
            raise ValueError(
                f"transfer_budget counts models and updates, but the selection {self.selection} "
                "sends additional models to get losses: leave one of the two out"
            )
        if self.privacy.example is not None and not conditions.arrival.is_static:
            raise ValueError(
                f"dp-sgd: with the arrival {conditions.arrival} clients' examples change over "
                "time, which the accountant does not cover: leave it out"
            )
        if self.freeze_at is not None:
            self._check_frozen(task, model, conditions)
        if conditions.keep_updates and self._divides(task, model):
            raise ValueError(
                f"keep_updates stores whole updates for attacks, but clients of {self.name} send "
                "only a part of the model: leave it out"
            )
        if conditions.keep_updates and attack.poisons:
            raise ValueError(
                f"keep_updates stores the examples of an update, but {attack} replaces them by "
                "poisoned examples: leave one of the two out"
            )
        _check_names([*self.measures(task, model, world), FAILURES])
        name = conditions.device
        there = device_of_model(model) if name is None else device_of(name)
        check_place(conditions.engine, name, there)
        self.check_engine(task, conditions.engine, model)
        algorithm = self._tried(task, model, clients or 1)
        if algorithm is not None and algorithm.has_own_objective:
            check_objective(conditions.engine)

    def _check_frozen(self, task: Task, model: nn.Module, conditions: Conditions) -> None:
        if conditions.arrival.is_static:
            raise ValueError(
                "freeze_at compares models on newly arrived data, but no data arrive in this "
                "run: give an arrival, such as arriving:0.1:3600"
            )
        if self._divides(task, model):
            raise ValueError(
                f"freeze_at needs the whole model, but the server of {self.name} has only a part "
                "of it"
            )

    def _divides(self, task: Task, model: nn.Module) -> bool:
        """Return whether a part of the model belongs to each client."""
        algorithm = self._tried(task, model, self.count(task) or 1)
        return algorithm is not None and algorithm.divides

    def _tried(self, task: Task, model: nn.Module, clients: int) -> Algorithm | None:
        """Return the algorithm; None if the task's optimizer fails.

        The code that uses the optimizer reports the failure.
        """
        try:
            start = algorithm_inputs_of(task, model, clients)
        except Exception:
            return None
        return with_adapter(self.algorithm(start), task, model)

    def measures(self, task: Task, model: nn.Module, world: World) -> list[str]:
        """Return the names of all metrics: on the test data, and measured by clients."""
        names = super().measures(task, model, world)
        whose = []
        if self._measured_on(task) is not None:
            whose.append("client")
            algorithm = self.algorithm_for(task, model, self.count(task) or 1)
            if self.fine_tune or type(algorithm).own is not Algorithm.own:
                whose.append("personal")
        conditions = conditions_of(world)
        if conditions is not None:
            if task.test is not None and conditions.attack.triggers:
                names.append("test_backdoor")
            if not conditions.arrival.is_static:
                whose.append("newest")
                whose += ["frozen_newest"] if self.freeze_at is not None else []
        return names + client_metric_names(whose, ["loss", *task.measures])

    def _measured_on(self, task: Task) -> Literal["held out", "test"] | None:
        """Return the data on which clients measure models; None without such data."""
        if self.held_out:
            return "held out"
        return "test" if self.test_parts(task) is not None else None

    def test_parts(self, task: Task) -> list[Tensor] | None:
        """Return the test examples of each client; None if no client has any."""
        # Each client's measurements would travel without protection.
        if task.test is None or self.privacy.secure is not None:
            return None
        parts = self.partition.divide_test(self.clients, task.train.keys, task.test.keys)
        return parts if parts is not None and any(map(len, parts)) else None

    def count(self, task: Task) -> int | None:
        """Return the number of clients, if known before the data are divided; else None."""
        if self.clients is not None:
            return self.clients
        names = self.names(task)
        return None if names is None else len(names)

    def divide(self, task: Task, seed: int) -> ClientParts:
        """Return the examples of each client.

        Raises ValueError if the partition does not fit the data.
        """
        return self.partition.divide(self.clients, task.train, seed)

    def division(self, task: Task, seed: int) -> PartitionDescription | None:
        return describe(
            self.partition,
            self.divide(task, seed),
            task.train.labels(),
            task.train.classes,
            self.names(task),
        )

    def parts(self, task: Task, seed: int, workers: int | None) -> Sequence[Tensor]:
        """Return the training examples of each client, as indices."""
        return split_held_out(self.divide(task, seed), self.held_out, seed, self.held_out_order)[0]

    def names(self, task: Task) -> list[str] | None:
        """Return the names of the clients; None if the data have no names."""
        return self.partition.names(self.clients, task.train.keys)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        """Return the server, with simulated clients or alone (`dure.federated.builders`)."""
        return builders.learner(self, task, context, seed)


def _check_names(names: Sequence[str]) -> None:
    """Raise ValueError if two metrics have the same name."""
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"two numbers would be reported as {name}: rename the task's metric")


def _check_sampled(task: Task, conditions: Conditions) -> None:
    """Raise ValueError for conditions that change the examples that a sampler relies on."""
    ideal = Conditions()
    for way in sorted(task.train.sampling.asks):
        spoils = {
            "arrival": not conditions.arrival.is_static,
            "attack": conditions.attack.poisons,
            "keep_updates": conditions.keep_updates != ideal.keep_updates,
        }
        for name in (name for name, there in spoils.items() if there):
            raise ValueError(
                f"{name}: {way} assumes that clients keep the same examples: leave one of the two "
                "out"
            )
