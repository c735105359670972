"""What all federated strategies have in common: their fields, and the two halves that run them.

    server half     dure.federated.server    the global model, who is asked when
    clients' half   dure.federated.client    examples, what clients keep, local training

A carrier takes messages between the two (`dure.protocol`): in a simulation, which joins them in one
process under a virtual clock, as they are.

A subclass is an algorithm: it adds its hyperparameters and says what its clients and its server do
(`algorithm`), when the server asks and combines (`pacing`), and how it moves the model
(`optimizer`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from dure.contracts.strategy import Kind, Learner, Place, Strategy, another, examples_for
from dure.contracts.task import Task
from dure.data import partition
from dure.data.batches import check_batch_size
from dure.data.examples import Examples
from dure.data.keys import name_of
from dure.data.partition import IID, Description, NaturalKey, Partition, Parts, describe
from dure.data.partition.natural_key import strangers
from dure.errors import warn
from dure.federated import aggregate
from dure.federated.aggregate import Aggregator, Mean
from dure.federated.algorithm import Algorithm, Start
from dure.federated.client.clients import Clients, LocalWork
from dure.federated.client.personal import Personal
from dure.federated.client.poisoning import check_poison, poisoned
from dure.federated.engines.choose import Setting, check_engine, engine_for
from dure.federated.engines.job import Engine, Job
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.server import sampling
from dure.federated.server.by_client import FAILURES, names_over
from dure.federated.server.pacing import Pacing, Rounds
from dure.federated.server.sampling import Selection, Uniform
from dure.federated.server.server import Server
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.fleet.conditions import Conditions
from dure.fleet.liars import count, liars
from dure.machine.threads import threads_for
from dure.protocol.carrier import Carrier
from dure.randomness.seeds import generator
from dure.settings import parse_fields
from dure.tasks.batch_norm import needs_two
from dure.tasks.flops import flops_per_step
from dure.tasks.trained import trains_of
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters, check_apart
from dure.tensors.frozen import frozen_of, load_frozen
from dure.wire.layout import Federation, Layout

HeldOutOrder = Literal["random", "newest"]
"""Which examples of a client are held out: drawn ones, or its last ones."""


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
            client by client; 0 measures on the test data that carry the client's key, if any do.
        fine_tune: epochs for which a client trains the global model further before its own is
            measured.
        held_out_order: which examples are held out: random, or newest, the last ones of each
            client.
        freeze_at: the round whose model is measured on the newest data beside every later one, for
            data that come and go.
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
    held_out_order: HeldOutOrder = "random"
    freeze_at: int | None = None

    name: ClassVar[str]
    title: ClassVar[str]
    kind: ClassVar[Kind] = "clients"
    unit: ClassVar[str] = "round"
    # Before, what the server and its clients keep was one state.
    oldest_checkpoint: ClassVar[int] = 2
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
        """The engine that computes what clients are asked.

        Raises ValueError for a wanted engine that cannot.
        """
        return engine_for(setting)

    def check_engine(self, task: Task, wanted: str, model: nn.Module | None = None) -> None:
        """Raises ValueError for an engine, asked for by name, that cannot compute the task.

        model: the task's, where there is one already.
        """
        check_engine(task, wanted, model)

    # What they share

    @property
    def label(self) -> str:
        # Only what differs from the defaults: labels are for legends and lists.
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
        if self.fine_tune and self._measured_on(task) is None:
            raise ValueError(
                "fine_tune measures clients' own models, which needs data that are held_out: give "
                "0.2"
            )
        if self.held_out_order not in get_args(HeldOutOrder):
            raise ValueError(
                f"held_out_order is {self.held_out_order!r}, but it is random or newest"
            )
        if self.freeze_at is not None and self.freeze_at < 0:
            raise ValueError(f"freeze_at is {self.freeze_at}, but it is a round: 0 or more")
        examples = len(task.train)
        # A server that has none cannot know.
        if self.clients is not None and 0 < examples < self.clients:
            raise ValueError(
                f"{self.clients} clients are more than the {examples} training examples"
            )
        self.optimizer()
        self.check_task(task)
        # A rule that needs more updates than a round has is refused before anything is computed.
        clients = self._count(task)
        if clients is not None:  # without keys it is the partition that refuses
            pacing = self.pacing(clients)
            self.rule().check(pacing.updates(clients))
            pacing.check(clients)

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Raises ValueError for a batch that is too small for the model, or shared memory."""
        check_apart(model)
        # A server that has no data leaves it to its clients, which check it too.
        singly = self.batch_size == 1 and len(task.train) > 0
        if singly and needs_two(model, examples_for(model, task)[0]):
            raise ValueError(
                "batch_size is 1, and the model has batch norm, which has no statistics of one "
                "example: take a batch_size of 2 or more"
            )

    def check_under(self, task: Task, model: nn.Module, conditions: Conditions) -> None:
        """Raises ValueError for liars that cannot be, and engines that cannot compute the task."""
        clients = self._count(task)
        attack = conditions.attack
        attackers = conditions.attackers
        if clients is not None and attackers and not count(clients, attackers):
            raise ValueError(
                f"attackers is {attackers}, but this share of {clients} clients is none: give a "
                f"larger"
            )
        if attack.poisons:
            check_poison(task.train, attack)
        if self.freeze_at is not None:
            self._check_frozen(task, model, conditions)
        _check_names([*self.measures(task, model, conditions), FAILURES])
        self.check_engine(task, conditions.engine, model)

    def _check_frozen(self, task: Task, model: nn.Module, conditions: Conditions) -> None:
        if conditions.arrival.still:
            raise ValueError(
                "freeze_at compares models on data that have just come, and none come here: give "
                "an arrival, such as arriving:0.1:3600"
            )
        if self.algorithm(_start(task, model, self._count(task) or 1)).divides:
            raise ValueError(
                f"freeze_at keeps a whole model, and the server of {self.name} has a part of it"
            )

    def measures(self, task: Task, model: nn.Module, conditions: Conditions | None) -> list[str]:
        """What evaluations measure, by name: on the test data, and what clients measure."""
        names = super().measures(task, model, conditions)
        whose = []
        if self._measured_on(task) is not None:
            whose.append("client")
            algorithm = self.algorithm(_start(task, model, self._count(task) or 1))
            if self.fine_tune or type(algorithm).own is not Algorithm.own:
                whose.append("personal")
        if conditions is not None:
            if task.test is not None and conditions.attack.triggers:
                names.append("test_backdoor")
            if not conditions.arrival.still:
                whose.append("newest")
                whose += ["frozen_newest"] if self.freeze_at is not None else []
        return names + names_over(whose, ["loss", *task.measures])

    def _measured_on(self, task: Task) -> Literal["held out", "test"] | None:
        """On which data clients measure models; None where there are none."""
        if self.held_out:
            return "held out"
        return "test" if self._test_parts(task) is not None else None

    def _test_parts(self, task: Task) -> list[Tensor] | None:
        """The test examples of each client; None where none is anybody's."""
        if task.test is None:
            return None
        parts = self.partition.divide_test(self.clients, task.train.keys, task.test.keys)
        return parts if parts is not None and any(map(len, parts)) else None

    def _count(self, task: Task) -> int | None:
        """How many clients there are, where that is known before the data are divided."""
        if self.clients is not None:
            return self.clients
        names = self.names(task)
        return None if names is None else len(names)

    def divide(self, task: Task, seed: int) -> Parts:
        """The examples of each client. Raises ValueError if the partition does not fit the data."""
        train = task.train
        return self.partition.divide(self.clients, len(train), train.labels(), train.keys, seed)

    def division(self, task: Task, seed: int) -> Description | None:
        return describe(
            self.partition,
            self.divide(task, seed),
            task.train.labels(),
            task.train.classes,
            self.names(task),
        )

    def names(self, task: Task) -> list[str] | None:
        """What the clients are called, where the data have names."""
        return self.partition.names(self.clients, task.train.keys)

    # The two halves

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        """Both halves in this process, joined by the place's carrier; or the server's alone."""
        if place.network is not None:
            return self._serving(task, place, place.network, seed)
        assert place.carrier is not None
        assert place.conditions is not None
        # The clients first: the carrier asks them who they are as soon as the server begins.
        model = place.model(task, seed)
        clients = self.clients_half(task, model, place.conditions, seed)
        place.ending.callback(clients.close)
        carrier = place.carrier(clients, seed)
        server = self.server_half(task, model, place, carrier, seed)
        place.ending.callback(server.close)
        return server

    def _serving(
        self, task: Task, place: Place, network: Callable[[Federation], Carrier], seed: int
    ) -> Learner:
        """The server, whose clients are elsewhere."""
        model = place.model(task, seed)
        clients = self._count(task)
        if clients is None:
            raise ValueError("clients is not given: a server has to know how many there may be")
        federation = Federation(
            clients=clients,
            seed=seed,
            layout=self.layout(task, model, clients),
            trains=trains_of(task, model),
            frozen=frozen_of(model),
            threads=self._threads(task, model, clients),
            samples=self.work().most_samples,
        )
        carrier = network(federation)
        server = self.server_half(task, model, place, carrier, seed)
        server.examples = max(1, sum(carrier.join().sizes))
        place.ending.callback(server.close)
        return server

    def _threads(self, task: Task, model: nn.Module, clients: int) -> int:
        """With how many threads a client computes, as in the simulation; 1 without examples."""
        train, test = examples_for(model, task)
        sample = test or train
        if not len(sample):
            return 1
        # Clients of mean size; whoever has fewer examples than a batch makes smaller steps.
        typical = len(train) / clients or self.batch_size or len(sample)
        return threads_for(flops_per_step(model, sample, min(self.batch_size or typical, typical)))

    def server_half(
        self, task: Task, model: nn.Module, place: Place, carrier: Carrier, seed: int
    ) -> Server:
        """The server, which learns of its clients through the carrier.

        model: the run's, which becomes the server's own.
        """
        train, test = examples_for(model, task)
        sample = test or train
        clients = len(carrier.join().sizes)
        attack = None
        lying = None
        if place.conditions is not None and place.conditions.attackers:
            attack = place.conditions.attack
            lying = _lying(place.conditions, clients, seed)
        return Server(
            task=task,
            model=model,
            test=test,
            algorithm=self.algorithm(_start(task, model, clients)),
            rule=self.rule(),
            optimizer=self.optimizer(),
            pacing=self.pacing(clients),
            carrier=carrier,
            group=place.group,
            seed=seed,
            sample=sample if len(sample) else None,
            batch_size=self.batch_size,
            attack=attack,
            liars=lying,
            names=self.names(task),
            freeze_at=self.freeze_at,
        )

    def one_client(
        self,
        task: Task,
        model: nn.Module,
        conditions: Conditions,
        seed: int,
        client: int,
        clients: int,
        divides: bool,
    ) -> Clients:
        """One client of so many, on a machine of its own.

        divides: whether its examples are those that the partition gives it; else all of the task's
        are its own.
        """
        own = torch.arange(len(task.train))
        if divides:
            own = self.divide(task, seed)[client]
        # The others are elsewhere: here they have nothing.
        parts = [own if other == client else own[:0] for other in range(clients)]
        tests = None
        # Where its test data are its own too, they are what it measures with.
        if not (divides or self.held_out) and task.test is not None:
            whole = torch.arange(len(task.test))
            tests = [whole if other == client else whole[:0] for other in range(clients)]
        return self.clients_half(task, model, conditions, seed, parts, tests)

    def layout(self, task: Task, model: nn.Module, clients: int) -> Layout:
        """The names under which the tensors of the model's messages travel."""
        flat = FlatParameters(another(model, task, 0))
        shared = self.algorithm(_start(task, model, clients)).shared(flat.copy())
        return Layout(_names(flat, shared), Buffers(model).names)

    def _personal(
        self,
        task: Task,
        fresh: Callable[[], nn.Module],
        held_out: Sequence[Tensor],
        tests: Sequence[Tensor] | None,
        newest: tuple[Examples, Sequence[Tensor]] | None,
        data: tuple[Examples, Examples | None],
        seed: int,
    ) -> Personal:
        """What measures: on test examples where clients have some, else on what they held out."""
        examples, test = data
        if tests is None and self._measured_on(task) == "test":
            tests = self._test_parts(task) or []
        return Personal(
            task=task,
            fresh=fresh,
            examples=examples if test is None or tests is None else test,
            held_out=held_out if tests is None else tests,
            seed=seed,
            fine_tune=self.fine_tune,
            newest=newest,
        )

    def clients_half(
        self,
        task: Task,
        model: nn.Module,
        conditions: Conditions,
        seed: int,
        parts: Sequence[Tensor] | None = None,
        tests: Sequence[Tensor] | None = None,
    ) -> Clients:
        """All clients of the federation, with their examples.

        model: the run's, which stays as it is. parts: the examples of each, where it is not the
        partition that says so. tests: the test examples with which each measures, likewise.
        """
        divided = parts is None
        # Engines are made later, when a forward pass may have given the run's model other buffers.
        fresh = another(model, task, seed)
        # Jobs have trained weights alone, so all models here have to have the run's frozen ones.
        # They are in its memory: where a run goes on, those of its checkpoint are put there.
        frozen = frozen_of(model)

        def one_more() -> nn.Module:
            made = another(fresh, task, seed)
            load_frozen(made, frozen)
            return made

        data = examples_for(model, task)
        examples = data[0]
        if parts is None:
            parts = self.divide(task, seed)
            if not self.held_out:
                _tell_strangers(task, self.names(task))
        own, held_out = _held_out(parts, self.held_out, seed, self.held_out_order)
        # What liars spoil is not measured on: these are as they came.
        newest = None if conditions.arrival.still else (examples, own)
        personal = self._personal(task, one_more, held_out, tests, newest, data, seed)
        attack = conditions.attack if conditions.attackers else None
        lying = _lying(conditions, len(own), seed)
        if attack is not None and attack.poisons:
            # Data are spoilt once, so liars on data are the same in all rounds (`Conditions` sees
            # to it).
            examples, own = poisoned(examples, own, lying(0), attack)
        algorithm = self.algorithm(_start(task, model, len(own)))
        synchronous = self.pacing(len(own)).synchronous
        # Where nobody looks at single updates, an engine need not form them. Liars forge them, and
        # `answer` may read them.
        sums = not algorithm.answers and attack is None and self.rule().sums

        # Called once jobs are there, perhaps again after `close`: each engine gets a model of its
        # own to change.
        def engine(
            jobs: Sequence[Job], chosen: str | None, chunk: int, threads: int | None
        ) -> Engine:
            return self.engine(
                Setting(
                    task=task,
                    model=one_more(),
                    examples=examples,
                    batch_size=self.batch_size,
                    seed=seed,
                    jobs=jobs,
                    processes=conditions.processes,
                    wanted=chosen or conditions.engine,
                    together=synchronous,
                    sums=sums,
                    chunk=chunk,
                    threads=threads,
                )
            )

        return Clients(
            parts=own,
            work=replace(self.work(), needs_two=needs_two(model, examples)),
            algorithm=algorithm,
            engine=engine,
            personal=personal,
            seed=seed,
            present=None if conditions.arrival.still else conditions.arrival.present,
            attack=attack,
            liars=lying,
            partial=self.sends_partial_work,
            lr_schedule=task.lr_schedule,
            # All that torch has, before a run has fewer for the steps of one client.
            threads=torch.get_num_threads(),
            names=self.names(task) if divided else None,
        )


def _names(
    flat: FlatParameters, shared: Sequence[Tensor]
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """What the flat weights that travel are called: parameters, where all of them do."""
    sizes = [buffer.numel() for buffer in flat.buffers]
    if sizes == [one.numel() for one in shared]:
        return flat.names
    return [[(f"shared:{index}", (one.numel(),))] for index, one in enumerate(shared)]


def _start(task: Task, model: nn.Module, clients: int) -> Start:
    # Only to read the rate; clients' optimizers are made by their engine.
    optimizer = optimizer_of(task, list(model.parameters()))
    lr = float(optimizer.param_groups[0].get("lr", float("nan")))
    return Start(model, FlatParameters(model).copy(), clients, lr)


def _lying(conditions: Conditions, clients: int, seed: int) -> Callable[[int], Collection[int]]:
    """Who lies in a round: the same all along, or others in every round."""

    def lying(round: int) -> Collection[int]:
        # Who lies is drawn anew where it depends on the round.
        turn = round if conditions.attackers_change else None
        return liars(clients, conditions.attackers, seed, turn)

    return lying


def _check_names(names: Sequence[str]) -> None:
    """Raises ValueError where two numbers would have one name."""
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(
                f"two numbers would be reported as {name}: call the task's metric otherwise"
            )


def _tell_strangers(task: Task, names: Sequence[str] | None) -> None:
    """Warns where test examples carry keys that no client has."""
    if names is None or task.test is None or task.test.keys is None or task.train.keys is None:
        return
    missing = strangers(task.train.keys, task.test.keys)
    if missing:
        some = ", ".join(map(name_of, missing[:5])) + (", ..." if len(missing) > 5 else "")
        warn(
            f"{len(missing)} keys of the test data are those of no client ({some}): no client "
            f"measures on these test examples"
        )


def _held_out(
    parts: Sequence[Tensor], share: float, seed: int, which: HeldOutOrder = "random"
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(what clients train on, what they keep for measuring).

    The share of each is what comes last, in an order of its own or in that of the data; a client
    that has one example alone trains on it.
    """
    if not share:
        return parts, []
    own = []
    kept = []
    for client, part in enumerate(parts):
        # Clients that are elsewhere have nothing here.
        if not len(part):
            own.append(part)
            kept.append(part)
            continue
        # At least one example to measure with, and at least one to train on, which goes first.
        count = min(max(round(share * len(part)), 1), len(part) - 1)
        if which == "newest":
            order = torch.arange(len(part))
        else:
            order = torch.randperm(len(part), generator=generator(seed, "held out", client))
        # Sorted: which examples are held out is random, the order in which a client has the rest is
        # not (arrival goes by it).
        own.append(part[order[: len(part) - count].sort().values])
        kept.append(part[order[len(part) - count :].sort().values])
    return own, kept
