"""The two halves that run a federated strategy, made of what the strategy says.

    server half     dure.federated.server    the global model, who is asked when
    clients' half   dure.federated.client    examples, what clients keep, local training

A carrier takes messages between the two (`dure.protocol`): in a simulation, which joins them in one
process under a virtual clock, as they are; over a network, where each half is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dure.contracts.strategy import Learner, Place, another, examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.held_out import HeldOutOrder, split
from dure.data.keys import name_of
from dure.data.partition import NaturalKey, Partition, Parts
from dure.data.partition.natural_key import strangers
from dure.errors import warn
from dure.federated.aggregate import Aggregator
from dure.federated.algorithm import Algorithm, Start, start_of
from dure.federated.client.clients import Clients, Keep, LocalWork, Make
from dure.federated.client.personal import Personal
from dure.federated.client.poisoning import poisoned
from dure.federated.engines.choose import Setting
from dure.federated.engines.job import Engine, Job
from dure.federated.engines.noised import Noised
from dure.federated.privacy.attacks.recording import UPDATES, Keeper
from dure.federated.privacy.choice import NOTHING, Privacy
from dure.federated.privacy.example_level import ExampleAccount, check_own_noise
from dure.federated.privacy.exposure import exposure
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.privacy.user_level.build import contribution, noised_rounds
from dure.federated.server.pacing import Pacing
from dure.federated.server.private import Private
from dure.federated.server.sampling import Selection
from dure.federated.server.server import Server
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.server.tossing import tossing
from dure.fleet.conditions import Conditions
from dure.fleet.liars import liars
from dure.machine.devices import home_of
from dure.machine.threads import threads_for
from dure.protocol.carrier import Carrier
from dure.randomness.secret import Secret
from dure.tasks.batch_norm import needs_two, statistics
from dure.tasks.flops import flops_per_step
from dure.tasks.trained import trains_of
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import frozen_of, load_frozen
from dure.wire.layout import Federation, Layout

if TYPE_CHECKING:
    # They need the extra "privacy", which runs without secure aggregation do without.
    from dure.federated.client.holding import Holding
    from dure.federated.privacy.secure_aggregation.clipped_contribution import Clipping
    from dure.federated.privacy.secure_aggregation.rounds import SecureRounds
    from dure.federated.privacy.user_level.local import LocalNoise
    from dure.wire.signatures import Key

SIMULATED = "simulation"
"""The name under which clients of a simulation sum."""


class Site(NamedTuple):
    """What a client on a machine of its own knows of the run, for sums of updates.

    run: its id. refuses: hears why the client takes no part in a sum. key: its identity.
    identities: public keys of all clients, by number, where their owner has signed them.
    smallest_cohort: the fewest clients of a sum in which it takes part.
    """

    run: str
    refuses: Callable[[str], None]
    key: Key | None = None
    identities: Mapping[int, str] | None = None
    smallest_cohort: int = 1


class Says(Protocol):
    """What halves ask of a strategy; `dure.federated.strategy.Federated` has the meanings."""

    name: ClassVar[str]

    @property
    def batch_size(self) -> int | None: ...
    @property
    def held_out(self) -> float: ...
    @property
    def held_out_order(self) -> HeldOutOrder: ...
    @property
    def fine_tune(self) -> int: ...
    @property
    def freeze_at(self) -> int | None: ...
    @property
    def sends_partial_work(self) -> bool: ...
    @property
    def fraction(self) -> float: ...
    @property
    def selection(self) -> Selection: ...
    @property
    def privacy(self) -> Privacy: ...
    @property
    def epsilon(self) -> float | None: ...
    @property
    def delta(self) -> float: ...
    @property
    def partition(self) -> Partition: ...

    def algorithm(self, start: Start) -> Algorithm: ...
    def pacing(self, clients: int) -> Pacing: ...
    def optimizer(self) -> ServerOptimizer: ...
    def rule(self) -> Aggregator: ...
    def engine(self, setting: Setting) -> Engine: ...
    def work(self) -> LocalWork: ...
    def count(self, task: Task) -> int | None: ...
    def names(self, task: Task) -> list[str] | None: ...
    def divide(self, task: Task, seed: int) -> Parts: ...
    def test_parts(self, task: Task) -> list[Tensor] | None: ...


def learner(strategy: Says, task: Task, place: Place, seed: int) -> Learner:
    """Both halves in this process, joined by the place's carrier; or the server's alone."""
    if place.network is not None:
        return _serving(strategy, task, place, place.network, seed)
    assert place.carrier is not None
    assert place.conditions is not None
    # The clients first: the carrier asks them who they are as soon as the server begins.
    model = place.model(task, seed)
    task = task.on(home_of(model))
    keep = _keep(place.conditions, place.folder, strategy.batch_size)
    clients = clients_half(strategy, task, model, place.conditions, seed, keep)
    place.ending.callback(clients.close)
    carrier = place.carrier(clients, seed)
    server = server_half(strategy, task, model, place, carrier, seed)
    place.ending.callback(server.close)
    return server


def _keep(conditions: Conditions, folder: Path | None, batch_size: int | None) -> Keep | None:
    """What keeps updates in the run folder; None where none are kept."""
    if not conditions.keep_updates:
        return None
    assert folder is not None, "a run that keeps updates has a folder"
    return Keeper(folder / UPDATES, conditions.keep_updates, batch_size)


# The server


def server_half(
    strategy: Says, task: Task, model: nn.Module, place: Place, carrier: Carrier, seed: int
) -> Server:
    """The server, which learns of its clients through the carrier.

    model: the run's, which becomes the server's own.
    """
    train, test = examples_for(model, task)
    sample = test or train
    clients = len(carrier.join().sizes)
    rule = strategy.rule()
    secure = None
    if strategy.privacy.secure is not None:
        clipping = _clipping(
            strategy.privacy, task, model, strategy.algorithm(start_of(task, model, clients))
        )
        secure, rule = _secure(strategy.privacy.secure, rule, clipping, place, seed)
    attack = None
    lying = None
    if place.conditions is not None and place.conditions.attackers:
        attack = place.conditions.attack
        lying = _lying(place.conditions, clients, seed)
    pacing = strategy.pacing(clients)
    # A simulation repeats itself; what protects clients elsewhere nobody may draw again.
    secret = Secret.simulated(seed) if place.network is None else Secret.system()
    return Server(
        task=task,
        model=model,
        test=test,
        algorithm=strategy.algorithm(start_of(task, model, clients)),
        rule=rule,
        optimizer=strategy.optimizer(),
        pacing=pacing,
        carrier=carrier,
        group=place.group,
        seed=seed,
        sample=sample if len(sample) else None,
        batch_size=strategy.batch_size,
        attack=attack,
        liars=lying,
        names=strategy.names(task),
        freeze_at=strategy.freeze_at,
        exposure=exposure(strategy.privacy, place.identities is not None),
        # What protects clients elsewhere is the system's, and is not drawn again.
        repeats=place.network is None or strategy.privacy == NOTHING,
        secure=secure,
        private=_private(strategy, task, model, place, carrier, secret, seed),
        examples=_account(strategy, carrier.join().sizes, place.network is None),
        toss=tossing(secret, carrier.once, strategy.fraction, clients) if pacing.tosses else None,
    )


def _account(strategy: Says, sizes: Sequence[int], simulated: bool) -> ExampleAccount | None:
    """What clients tell of their examples, where these are protected."""
    example = strategy.privacy.example
    if example is None:
        return None
    work = strategy.work()
    steps = [work.steps_of(size) for size in sizes]
    return ExampleAccount(
        example, strategy.delta, sizes, steps, strategy.batch_size, simulated=simulated
    )


def _private(
    strategy: Says,
    task: Task,
    model: nn.Module,
    place: Place,
    carrier: Carrier,
    secret: Secret,
    seed: int,
) -> Private | None:
    """Differential privacy of clients, where the strategy wants it."""
    user = strategy.privacy.user
    if user is None:
        return None
    sizes = carrier.join().sizes
    copy = another(model, task, seed)
    return noised_rounds(
        user,
        strategy,
        model=copy,
        algorithm=strategy.algorithm(start_of(task, copy, len(sizes))),
        sizes=sizes,
        keyed=isinstance(strategy.partition, NaturalKey),
        once=carrier.once,
        secret=secret,
        folder=place.folder,
    )


def _secure(
    settings: SecureAggregation,
    rule: Aggregator,
    clipping: Clipping | None,
    place: Place,
    seed: int,
) -> tuple[SecureRounds, Aggregator]:
    """(what sums a round's updates, the rule for the sums' means)."""
    from dure.federated.privacy.secure_aggregation.rounds import SecureRounds, Sums, parted

    here = place.network is None
    run = SIMULATED if here else str(place.config.get("run", ""))
    groups, of_means = parted(rule)
    secret = Secret.simulated(seed) if here else Secret.system()
    return SecureRounds(Sums(settings, run, clipping), groups, secret, place.identities), of_means


def _serving(
    strategy: Says, task: Task, place: Place, network: Callable[[Federation], Carrier], seed: int
) -> Learner:
    """The server, whose clients are elsewhere."""
    check_own_noise(strategy.privacy)
    model = place.model(task, seed)
    clients = strategy.count(task)
    if clients is None:
        raise ValueError("clients is not given: a server has to know how many there may be")
    if strategy.privacy.secure is not None and strategy.privacy.example is not None:
        raise ValueError(
            "the account of dp-sgd needs to know how many examples each client has, and under "
            "secure aggregation over a network nobody is told: leave one of them out"
        )
    federation = Federation(
        clients=clients,
        seed=seed,
        layout=layout(strategy, task, model, clients),
        trains=trains_of(task, model),
        frozen=frozen_of(model),
        threads=_threads(strategy, task, model, clients),
        samples=strategy.work().most_samples,
        holds=strategy.privacy.secure is not None,
    )
    carrier = network(federation)
    server = server_half(strategy, task, model, place, carrier, seed)
    if strategy.privacy.secure is None:
        server.examples = max(1, sum(carrier.join().sizes))
    place.ending.callback(server.close)
    return server


def _threads(strategy: Says, task: Task, model: nn.Module, clients: int) -> int:
    """With how many threads a client computes, as in the simulation; 1 without examples."""
    train, test = examples_for(model, task)
    sample = test or train
    if not len(sample):
        return 1
    # Clients of mean size; whoever has fewer examples than a batch makes smaller steps.
    typical = len(train) / clients or strategy.batch_size or len(sample)
    return threads_for(flops_per_step(model, sample, min(strategy.batch_size or typical, typical)))


def layout(strategy: Says, task: Task, model: nn.Module, clients: int) -> Layout:
    """The names under which the tensors of the model's messages travel."""
    flat = FlatParameters(another(model, task, 0))
    shared = strategy.algorithm(start_of(task, model, clients)).shared(flat.copy())
    return Layout(_names(flat, shared), Buffers(model).names)


def _names(
    flat: FlatParameters, shared: Sequence[Tensor]
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """What the flat weights that travel are called: parameters, where all of them do."""
    sizes = [buffer.numel() for buffer in flat.buffers]
    if sizes == [one.numel() for one in shared]:
        return flat.names
    return [[(f"shared:{index}", (one.numel(),))] for index, one in enumerate(shared)]


# The clients


def clients_half(
    strategy: Says,
    task: Task,
    model: nn.Module,
    conditions: Conditions,
    seed: int,
    keep: Keep | None = None,
) -> Clients:
    """All clients of the federation, with the examples that the partition gives them.

    model: the run's, which stays as it is. keep: told of every update that is sent.
    """
    parts = strategy.divide(task, seed)
    names = strategy.names(task)
    tests = None
    if not strategy.held_out:
        _tell_strangers(task, names)
        tests = strategy.test_parts(task)
    has = _Has(parts, tests, names)
    secret = Secret.simulated(seed)
    return _clients(strategy, task, model, conditions, seed, has, secret, keep=keep)


def one_client(
    strategy: Says,
    task: Task,
    model: nn.Module,
    conditions: Conditions,
    seed: int,
    client: int,
    clients: int,
    divides: bool,
    site: Site,
) -> Clients:
    """One client of so many, on a machine of its own.

    site: what it knows of the run and of the others. divides: whether its examples are those that
    the partition gives it; else all of the task's are its own. Raises ValueError for noise that
    others could draw again.
    """
    check_own_noise(strategy.privacy)
    own = strategy.divide(task, seed)[client] if divides else torch.arange(len(task.train))
    tests = None
    if not strategy.held_out and divides:
        tests = strategy.test_parts(task)
    # Where its test data are its own too, they are what it measures with.
    elif not strategy.held_out and task.test is not None:
        tests = _alone(torch.arange(len(task.test)), client, clients)
    has = _Has(_alone(own, client, clients), tests, None)
    secret = Secret.system()
    return _clients(strategy, task, model, conditions, seed, has, secret, site=site)


def _alone(own: Tensor, client: int, clients: int) -> list[Tensor]:
    """What each of so many has here; the others are elsewhere, and have nothing."""
    return [own if other == client else own[:0] for other in range(clients)]


class _Has(NamedTuple):
    """What clients have here: examples and test examples of each, as indices, and names.

    tests: None where they measure on what they hold out, or not at all.
    """

    parts: Sequence[Tensor]
    tests: Sequence[Tensor] | None
    names: Sequence[str] | None


def _clients(
    strategy: Says,
    task: Task,
    model: nn.Module,
    conditions: Conditions,
    seed: int,
    has: _Has,
    secret: Secret,
    site: Site | None = None,
    keep: Keep | None = None,
) -> Clients:
    """The half of clients that have this.

    secret: where their keys, their own noise and rounding come from. site: of a client that is
    alone here.
    """
    one_more = _models(task, model, seed)
    examples, test = examples_for(model, task)
    own, held_out = split(has.parts, strategy.held_out, seed, strategy.held_out_order)
    still = conditions.arrival.still
    personal = Personal(
        task=task,
        fresh=one_more,
        examples=examples if test is None or has.tests is None else test,
        held_out=held_out if has.tests is None else has.tests,
        seed=seed,
        fine_tune=strategy.fine_tune,
        # What liars spoil is not measured on: these are as they came.
        newest=None if still else (examples, own),
    )
    attack = conditions.attack if conditions.attackers else None
    lying = _lying(conditions, len(own), seed)
    if attack is not None and attack.poisons:
        # Data are spoilt once, so liars on data are the same in all rounds (`Conditions` sees to
        # it).
        examples, own = poisoned(examples, own, lying(0), attack)
    algorithm = strategy.algorithm(start_of(task, model, len(own)))
    # Where nobody looks at single updates, an engine need not form them. Liars forge them, `answer`
    # may read them, clipping looks at each, and those that are kept are written.
    looks = (
        algorithm.answers
        or attack is not None
        or strategy.privacy.user is not None
        or keep is not None
    )
    sums = not looks and strategy.rule().sums
    synchronous = strategy.pacing(len(own)).synchronous
    example = strategy.privacy.example
    noised = None if example is None else Noised(example, secret)
    engines = _engines(
        strategy, task, one_more, examples, seed, conditions, synchronous, sums, noised
    )
    return Clients(
        parts=own,
        work=replace(strategy.work(), needs_two=needs_two(model, examples)),
        algorithm=algorithm,
        engine=engines,
        personal=personal,
        seed=seed,
        present=None if still else conditions.arrival.present,
        attack=attack,
        liars=lying,
        partial=strategy.sends_partial_work,
        lr_schedule=task.lr_schedule,
        # All that torch has, before a run has fewer for the steps of one client.
        threads=torch.get_num_threads(),
        names=has.names,
        keep=keep,
        coins=None if noised is None else noised.secret,
        holding=_holding(strategy, task, model, algorithm, list(map(len, own)), secret, site),
        protect=_local_noise(strategy.privacy, task, model, algorithm, secret),
    )


def _local_noise(
    privacy: Privacy,
    task: Task,
    model: nn.Module,
    algorithm: Algorithm,
    secret: Secret,
) -> LocalNoise | None:
    """What adds noise to updates before they are sent, where each client does so for itself."""
    user = privacy.user
    if user is None or user.where != "local":
        return None
    from dure.federated.privacy.user_level.local import LocalNoise

    copy = another(model, task, 0)
    _, pieces = contribution(copy, algorithm)
    places = list(statistics(copy, Buffers(copy).names))
    return LocalNoise(user, pieces, places, secret)


def _clipping(
    privacy: Privacy, task: Task, model: nn.Module, algorithm: Algorithm
) -> Clipping | None:
    """How clients clip, where they have differential privacy, and only their sum is seen."""
    if privacy.user is None:
        return None
    from dure.federated.privacy.secure_aggregation.clipped_contribution import Clipping

    copy = another(model, task, 0)
    like, pieces = contribution(copy, algorithm)
    return Clipping(privacy.user, like, pieces, list(statistics(copy, Buffers(copy).names)))


def _tell_large(settings: SecureAggregation, sizes: Sequence[int]) -> None:
    """Warns where clients weigh less in a sum than their examples would."""
    larger = [size for size in sizes if size > settings.most_examples]
    if larger:
        warn(
            f"{settings.name}: {len(larger)} of {len(sizes)} clients have more than "
            f"{settings.most_examples} examples (up to {max(larger)}), and count as if they had "
            f"so many: give a larger most_examples to weigh them by all"
        )


def _holding(
    strategy: Says,
    task: Task,
    model: nn.Module,
    algorithm: Algorithm,
    sizes: Sequence[int],
    secret: Secret,
    site: Site | None,
) -> Holding | None:
    """What holds updates, where they stay with their clients."""
    settings = strategy.privacy.secure
    if settings is None:
        return None
    from dure.federated.client.holding import Holding
    from dure.federated.privacy.secure_aggregation.rounds import Sums

    if strategy.privacy.user is None:
        _tell_large(settings, sizes)
    clipping = _clipping(strategy.privacy, task, model, algorithm)
    if site is None:
        sums = Sums(settings, SIMULATED, clipping)
        return Holding(sums, algorithm, secret)
    return Holding(
        Sums(settings, site.run, clipping),
        algorithm,
        secret,
        identity=site.key if site.identities is not None else None,
        roster=site.identities,
        minimum=site.smallest_cohort,
        refuses=lambda client, reason: site.refuses(reason),
    )


def _models(task: Task, model: nn.Module, seed: int) -> Callable[[], nn.Module]:
    """Makes models like the run's as it is now, one at each call."""
    # Engines are made later, when a forward pass may have given the run's model other buffers.
    fresh = another(model, task, seed)
    # Jobs have trained weights alone, so all models here have to have the run's frozen ones. They
    # are in its memory: where a run goes on, those of its checkpoint are put there.
    frozen = frozen_of(model)

    def one_more() -> nn.Module:
        made = another(fresh, task, seed)
        load_frozen(made, frozen)
        return made

    return one_more


def _engines(
    strategy: Says,
    task: Task,
    one_more: Callable[[], nn.Module],
    examples: Examples,
    seed: int,
    conditions: Conditions,
    together: bool,
    sums: bool,
    noised: Noised | None,
) -> Make:
    """Makes engines; together, sums, noised: as `Setting` has them."""

    # Called once jobs are there, perhaps again after `close`: each engine gets a model of its own
    # to change.
    def engine(jobs: Sequence[Job], chosen: str | None, chunk: int, threads: int | None) -> Engine:
        return strategy.engine(
            Setting(
                task=task,
                model=one_more(),
                examples=examples,
                batch_size=strategy.batch_size,
                seed=seed,
                jobs=jobs,
                processes=conditions.processes,
                wanted=chosen or conditions.engine,
                together=together,
                sums=sums,
                chunk=chunk,
                threads=threads,
                noised=noised,
            )
        )

    return engine


def _lying(conditions: Conditions, clients: int, seed: int) -> Callable[[int], Collection[int]]:
    """Who lies in a round: the same all along, or others in every round."""

    def lying(round: int) -> Collection[int]:
        # Who lies is drawn anew where it depends on the round.
        turn = round if conditions.attackers_change else None
        return liars(clients, conditions.attackers, seed, turn)

    return lying


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
