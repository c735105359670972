"""The two halves that run a federated strategy, made of what the strategy says.

    server half     dure.federated.server    the global model, who is asked when
    clients' half   dure.federated.client    examples, what clients keep, local training

A carrier takes messages between the two (`dure.protocol`): in a simulation, which joins them in one
process under a virtual clock, as they are; over a network, where each half is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dure.contracts.strategy import Learner, Place, another, examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.held_out import HeldOutOrder, split
from dure.data.keys import name_of
from dure.data.partition import Parts
from dure.data.partition.natural_key import strangers
from dure.data.size import example_bytes
from dure.errors import warn
from dure.federated import protecting
from dure.federated.algorithm import start_of
from dure.federated.client.clients import Clients, Keep, Make
from dure.federated.client.personal import Personal
from dure.federated.client.poisoning import poisoned
from dure.federated.engines.choose import Setting
from dure.federated.engines.job import Engine, Job
from dure.federated.engines.noised import Noised
from dure.federated.engines.objective import Objective
from dure.federated.privacy.attacks.recording import UPDATES, Keeper
from dure.federated.privacy.exposure import exposure
from dure.federated.server.cost import Cost
from dure.federated.server.pacing import Pacing
from dure.federated.server.server import Server
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.server.smallest_cohort import why_not
from dure.federated.server.tossing import tossing
from dure.fleet.conditions import Conditions
from dure.fleet.energy import NoEnergy
from dure.fleet.liars import liars
from dure.fleet.upload import upload
from dure.machine.devices import home_of
from dure.machine.threads import threads_for
from dure.protocol.carrier import Carrier
from dure.randomness.secret import Secret
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.batch_norm import needs_two
from dure.tasks.flops import flops_per_step
from dure.tasks.trained import trains_of
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import frozen_of, load_frozen
from dure.wire.layout import Federation, Layout


class Says(protecting.Protects, Protocol):
    """What halves ask of a strategy; `dure.federated.strategy.Federated` has the meanings."""

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

    def pacing(self, clients: int) -> Pacing: ...
    def optimizer(self) -> ServerOptimizer: ...
    def engine(self, setting: Setting) -> Engine: ...
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
    server.cost = _cost(strategy, task, model, place.conditions, seed)
    place.ending.callback(server.close)
    return server


def _cost(strategy: Says, task: Task, model: nn.Module, conditions: Conditions, seed: int) -> Cost:
    """What clients spend, next to what uploading all of their examples would cost."""
    before = generators_state()  # reading an example may draw
    each = example_bytes(task.train)
    restore_generators(before)
    sizes = [round(each * count) for count in strategy.divide(task, seed).sizes.tolist()]
    energy = conditions.energy
    raw = upload(sizes, conditions.devices, seed, conditions.server_mbit, energy)
    counted = not isinstance(energy, NoEnergy)
    train, _ = examples_for(task)
    return Cost(raw, energy, flops_per_step(model, train, 1) if counted else 0.0)


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
    train, test = examples_for(task)
    sample = test or train
    clients = len(carrier.join().sizes)
    secret = protecting.secret_of(place, seed)
    secure, rule = protecting.secure(strategy, task, model, place, clients, secret)
    attack = None
    lying = None
    if place.conditions is not None and place.conditions.attackers:
        attack = place.conditions.attack
        lying = _lying(place.conditions, clients, seed)
    pacing = strategy.pacing(clients)
    server = Server(
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
        repeats=protecting.repeats(strategy.privacy, place),
        secure=secure,
        private=protecting.noised(strategy, task, model, place, carrier, secret, seed),
        examples=protecting.account(strategy, carrier.join().sizes, place.network is None),
        toss=tossing(secret, carrier.once, strategy.fraction, clients) if pacing.tosses else None,
    )
    if strategy.privacy.counts_passes:
        server.examples = clients
    return server


def _serving(
    strategy: Says, task: Task, place: Place, network: Callable[[Federation], Carrier], seed: int
) -> Learner:
    """The server, whose clients are elsewhere."""
    protecting.check_served(strategy)
    if strategy.selection.asks:
        raise ValueError(
            f"the selection {strategy.selection} asks clients for their losses before a round, "
            f"which only those of a simulation are: take one that looks at their last losses"
        )
    model = place.model(task, seed)
    clients = strategy.count(task)
    if clients is None:
        raise ValueError("clients is not given: a server has to know how many there may be")
    federation = Federation(
        clients=clients,
        seed=seed,
        layout=layout(strategy, task, model, clients),
        trains=trains_of(task, model),
        frozen=frozen_of(model),
        threads=_threads(strategy, task, model, clients),
        samples=strategy.work().most_samples,
        holds=strategy.privacy.secure is not None,
        steps=strategy.work().steps_of,
        why_not=partial(_why_not, strategy, clients),
    )
    carrier = network(federation)
    server = server_half(strategy, task, model, place, carrier, seed)
    if strategy.privacy.secure is None:
        server.examples = max(1, sum(carrier.join().sizes))
    else:
        server.knows_sizes = False
    place.ending.callback(server.close)
    return server


def _why_not(strategy: Says, clients: int, asked: int) -> str | None:
    """Why the run cannot keep to so many clients in each new model; None where it can."""
    secure = strategy.privacy.secure
    sums = None if secure is None else secure.minimum
    return why_not(asked, clients, strategy.pacing(clients), strategy.rule(), sums)


def _threads(strategy: Says, task: Task, model: nn.Module, clients: int) -> int:
    """With how many threads a client computes, as in the simulation; 1 without examples."""
    train, test = examples_for(task)
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
    site: protecting.Site,
) -> Clients:
    """One client of so many, on a machine of its own.

    site: what it knows of the run and of the others. divides: whether its examples are those that
    the partition gives it; else all of the task's are its own. Raises ValueError for noise that
    others could draw again.
    """
    protecting.check_served(strategy)
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
    site: protecting.Site | None = None,
    keep: Keep | None = None,
) -> Clients:
    """The half of clients that have this.

    secret: where their keys, their own noise and rounding come from. site: of a client that is
    alone here.
    """
    one_more = _models(task, model, seed)
    examples, test = examples_for(task)
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
    if examples.sampling.weights is not None:
        # On a network, others have nothing here.
        for part in filter(len, own):
            examples.sampling.of(part)
    attack = conditions.attack if conditions.attackers else None
    lying = _lying(conditions, len(own), seed)
    if attack is not None and attack.poisons:
        # Data are spoilt once, so liars on data are the same in all rounds (`Conditions` sees to
        # it).
        examples, own = poisoned(examples, own, lying(0), attack)
    # What liars spoil they tell of, too.
    losses = partial(personal.losses, examples)
    algorithm = strategy.algorithm(start_of(task, model, len(own)))
    # Where nobody looks at single updates, an engine need not form them. Liars forge them, `answer`
    # may read them, and `step`, clipping looks at each, and those that are kept are written.
    looks = (
        algorithm.answers
        or algorithm.has_own_step
        or attack is not None
        or strategy.privacy.user is not None
        or keep is not None
    )
    sums = not looks and strategy.rule().sums
    synchronous = strategy.pacing(len(own)).synchronous
    example = strategy.privacy.example
    noised = None if example is None else Noised(example, secret)
    objective = algorithm.objective if algorithm.has_own_objective else None
    engines = _engines(
        strategy, task, one_more, examples, seed, conditions, synchronous, sums, noised, objective
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
        holding=protecting.holding(
            strategy, task, model, algorithm, list(map(len, own)), secret, site
        ),
        protect=protecting.local_noise(strategy.privacy, task, model, algorithm, secret),
        losses=losses,
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
    objective: Objective | None,
) -> Make:
    """Makes engines; together, sums, noised, objective: as `Setting` has them."""

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
                objective=objective,
                deadline=conditions.deadline,
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
