"""Builders of the server and the clients of a federated run, from its strategy.

    server      dure.federated.server    the global model; requests and their times
    clients     dure.federated.client    examples, client state, local training

A carrier moves messages between the two (`dure.protocol`). In a simulation both run in one process
under a virtual clock; over a network each side runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.learner import Learner
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.data.client_part import HeldOutOrder, split_held_out
from dure.data.examples import Examples
from dure.data.keys import name_of
from dure.data.partition import ClientParts
from dure.data.partition.natural_key import unowned_keys
from dure.errors import warn
from dure.federated import protections
from dure.federated.attacks.recording import UPDATES, UpdateRecorder
from dure.federated.client.clients import FederatedClients, UpdateCallback
from dure.federated.client.evaluation import ClientEvaluator
from dure.federated.client.jobs import ClientData, LocalTraining, MakeEngine, RunEngine
from dure.federated.client.poisoning import poisoned
from dure.federated.engines.engine_choice import EngineInputs
from dure.federated.engines.job import ClientEngine, ClientJob
from dure.federated.engines.noised import StepNoise
from dure.federated.engines.objective import Objective
from dure.federated.server.cost import ClientCosts
from dure.federated.server.server import FederatedServer, ServerSettings
from dure.federated.server.smallest_cohort import cohort_objection
from dure.fleet.conditions import Conditions
from dure.fleet.energy import NoEnergy
from dure.fleet.malicious import Attackers
from dure.fleet.upload import example_bytes, upload
from dure.machine.devices import device_of_model
from dure.machine.threads import threads_for
from dure.protocol.carrier import Carrier
from dure.protocol.server_context import ServerContext
from dure.randomness.secret import Secret
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.batch_norm import needs_two
from dure.tasks.flops import flops_per_step
from dure.tasks.task_summary import trains_of
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import frozen_of, load_frozen
from dure.wire.layout import FederationSpec, ModelLayout


class FederatedSettings(protections.ProtectionSettings, ServerSettings, Protocol):
    """Settings that the builders read; `dure.federated.strategy.Federated` documents them."""

    @property
    def held_out(self) -> float: ...
    @property
    def held_out_order(self) -> HeldOutOrder: ...
    @property
    def fine_tune(self) -> int: ...
    @property
    def sends_partial_work(self) -> bool: ...

    def engine(self, setting: EngineInputs) -> ClientEngine: ...
    def count(self, task: Task) -> int | None: ...
    def divide(self, task: Task, seed: int) -> ClientParts: ...
    def test_parts(self, task: Task) -> list[Tensor] | None: ...


def learner(strategy: FederatedSettings, task: Task, context: RankContext, seed: int) -> Learner:
    """Return the server: with simulated clients behind the place's carrier, or over a network."""
    assert isinstance(context, ServerContext)
    if context.network is not None:
        return _serving(strategy, task, context, context.network, seed)
    assert context.carrier is not None
    assert context.conditions is not None
    # Build the clients first: the carrier reads their sizes as soon as the server starts.
    model = context.model(task, seed)
    task = task.on(device_of_model(model))
    keep = _keep(context.conditions, context.folder, strategy.batch_size)
    clients = build_clients(strategy, task, model, context.conditions, seed, keep)
    context.ending.callback(clients.close)
    carrier = context.carrier(clients, seed)
    server = build_server(strategy, task, model, context, carrier, seed)
    server.cost = _cost(strategy, task, model, context.conditions, seed)
    # Held-out examples are in no pass over the training data.
    if strategy.held_out and not strategy.privacy.counts_passes:
        server.examples = max(1, sum(carrier.join().sizes))
    context.ending.callback(server.close)
    return server


def _cost(
    strategy: FederatedSettings, task: Task, model: nn.Module, conditions: Conditions, seed: int
) -> ClientCosts:
    """Return the meter of the clients' costs, next to the cost of uploading all their examples."""
    before = generators_state()  # reading an example may draw random numbers
    each = example_bytes(task.train)
    restore_generators(before)
    sizes = [round(each * count) for count in strategy.divide(task, seed).sizes.tolist()]
    energy = conditions.energy
    raw = upload(sizes, conditions.devices, seed, conditions.server_mbit, energy)
    counted = not isinstance(energy, NoEnergy)
    train, _ = examples_for(task)
    return ClientCosts(raw, energy, flops_per_step(model, train, 1) if counted else 0.0)


def _keep(
    conditions: Conditions, folder: Path | None, batch_size: int | None
) -> UpdateCallback | None:
    """Return the recorder of updates in the run folder; None if no updates are recorded."""
    if not conditions.keep_updates:
        return None
    assert folder is not None, "keep_updates needs a run folder: give out"
    return UpdateRecorder(folder / UPDATES, conditions.keep_updates, batch_size)


# The server


def build_server(
    strategy: FederatedSettings,
    task: Task,
    model: nn.Module,
    context: ServerContext,
    carrier: Carrier,
    seed: int,
) -> FederatedServer:
    """Return the server, which reaches its clients through the carrier.

    Args:
        strategy: the strategy of the run.
        task: the task of the run.
        model: the run's model, which the server takes over.
        context: context of the server: conditions, group, run folder, identities.
        carrier: transport between server and clients.
        seed: of the run.
    """
    clients = len(carrier.join().sizes)
    server = FederatedServer(
        strategy,
        task,
        model,
        carrier=carrier,
        group=context.group,
        seed=seed,
        protections=protections.server_protections_of(
            strategy, task, model, context, carrier, seed
        ),
        attackers=_attackers(context.conditions, clients, seed),
    )
    if strategy.privacy.counts_passes:
        server.examples = clients
    return server


def _serving(
    strategy: FederatedSettings,
    task: Task,
    context: ServerContext,
    network: Callable[[FederationSpec], Carrier],
    seed: int,
) -> Learner:
    """Return the server of a run whose clients are remote."""
    protections.check_served(strategy)
    if strategy.selection.asks:
        raise ValueError(
            f"the selection {strategy.selection} asks clients for their losses before a round, "
            "which only simulations support: use a selection by their last losses"
        )
    model = context.model(task, seed)
    clients = strategy.count(task)
    if clients is None:
        raise ValueError("the number of clients is missing, which a server needs: give clients")
    federation = FederationSpec(
        clients=clients,
        seed=seed,
        layout=message_layout(strategy, task, model, clients),
        trains=trains_of(task, model),
        frozen=frozen_of(model),
        threads=_threads(strategy, task, model, clients),
        samples=strategy.work().most_samples,
        holds=strategy.privacy.secure is not None,
        steps=strategy.work().steps_of,
        cohort_objection=partial(_cohort_objection, strategy, clients),
    )
    carrier = network(federation)
    server = build_server(strategy, task, model, context, carrier, seed)
    if strategy.privacy.secure is None:
        server.examples = max(1, sum(carrier.join().sizes))
    else:
        server.knows_sizes = False
    context.ending.callback(server.close)
    return server


def _cohort_objection(strategy: FederatedSettings, clients: int, asked: int) -> str | None:
    """Return why the run cannot have `asked` clients in each new model; None if it can."""
    secure = strategy.privacy.secure
    sums = None if secure is None else secure.minimum
    return cohort_objection(asked, clients, strategy.pacing(clients), strategy.rule(), sums)


def _threads(strategy: FederatedSettings, task: Task, model: nn.Module, clients: int) -> int:
    """Return the number of threads of a client, as in the simulation; 1 without examples."""
    train, test = examples_for(task)
    sample = test or train
    if not len(sample):
        return 1
    # Clients of mean size; a client with fewer examples than a batch makes smaller steps.
    typical = len(train) / clients or strategy.batch_size or len(sample)
    return threads_for(flops_per_step(model, sample, min(strategy.batch_size or typical, typical)))


def message_layout(
    strategy: FederatedSettings, task: Task, model: nn.Module, clients: int
) -> ModelLayout:
    """Return the names under which the tensors of the model's messages travel."""
    flat = FlatParameters(unused_copy(model, task, 0))
    shared = strategy.algorithm_for(task, model, clients).shared(flat.copy())
    return ModelLayout(_names(flat, shared), BufferNames(model).names)


def _names(
    flat: FlatParameters, shared: Sequence[Tensor]
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return names of the flat weights that travel: parameter names if all parameters do."""
    sizes = [buffer.numel() for buffer in flat.buffers]
    if sizes == [one.numel() for one in shared]:
        return flat.names
    return [[(f"shared:{index}", (one.numel(),))] for index, one in enumerate(shared)]


# The clients


def build_clients(
    strategy: FederatedSettings,
    task: Task,
    model: nn.Module,
    conditions: Conditions,
    seed: int,
    keep: UpdateCallback | None = None,
) -> FederatedClients:
    """Return all clients of the federation, with the examples that the partition assigns.

    Args:
        strategy: the strategy of the run.
        task: the task of the run.
        model: the run's model, which stays unchanged.
        conditions: devices, availability and attacks of the clients.
        seed: of the run.
        keep: called with every update that is sent; None without a recorder.
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


def build_client(
    strategy: FederatedSettings,
    task: Task,
    model: nn.Module,
    conditions: Conditions,
    seed: int,
    client: int,
    clients: int,
    divides: bool,
    site: protections.SecureClientContext,
) -> FederatedClients:
    """Return a client of a federation of `clients` clients, alone on its machine.

    Args:
        strategy: the strategy of the run.
        task: the client's task, with its own data.
        model: the run's model, which stays unchanged.
        conditions: of the run.
        seed: of the run.
        client: number of the client.
        clients: number of clients in the federation.
        divides: whether the client has the examples that the partition assigns; otherwise all
            examples of the task are the client's.
        site: the client's knowledge of the run and of the other clients.

    Raises:
        ValueError: the strategy cannot protect remote clients, for example because others could
            draw the client's noise again.
    """
    protections.check_served(strategy)
    own = strategy.divide(task, seed)[client] if divides else torch.arange(len(task.train))
    tests = None
    if not strategy.held_out and divides:
        tests = strategy.test_parts(task)
    # If all test data are the client's, the client measures on them.
    elif not strategy.held_out and task.test is not None:
        tests = _alone(torch.arange(len(task.test)), client, clients)
    has = _Has(_alone(own, client, clients), tests, None)
    secret = Secret.system()
    return _clients(strategy, task, model, conditions, seed, has, secret, site=site)


def _alone(own: Tensor, client: int, clients: int) -> list[Tensor]:
    """Return the indices `own` for `client`, and no indices for the other clients."""
    return [own if other == client else own[:0] for other in range(clients)]


class _Has(NamedTuple):
    """Local data of each client: examples and test examples, as indices, and names.

    tests: None for clients that measure on their held-out examples, or not at all.
    """

    parts: Sequence[Tensor]
    tests: Sequence[Tensor] | None
    names: Sequence[str] | None


def _clients(
    strategy: FederatedSettings,
    task: Task,
    model: nn.Module,
    conditions: Conditions,
    seed: int,
    has: _Has,
    secret: Secret,
    site: protections.SecureClientContext | None = None,
    keep: UpdateCallback | None = None,
) -> FederatedClients:
    """Return `FederatedClients` for these local data.

    Args:
        strategy: the strategy of the run.
        task: the task of the run.
        model: the run's model, which stays unchanged.
        conditions: devices, availability and attacks of the clients.
        seed: of the run.
        has: local data of each client.
        secret: source of keys, of per-client noise and of rounding.
        site: knowledge of a client that is alone in this process; None in a simulation.
        keep: called with every update that is sent; None without a recorder.
    """
    one_more = _models(task, model, seed)
    examples, test = examples_for(task)
    own, held_out = split_held_out(has.parts, strategy.held_out, seed, strategy.held_out_order)
    still = conditions.arrival.is_static
    personal = ClientEvaluator(
        task=task,
        fresh=one_more,
        examples=examples if test is None or has.tests is None else test,
        held_out=held_out if has.tests is None else has.tests,
        seed=seed,
        fine_tune=strategy.fine_tune,
        # Unspoilt data: models are not measured on examples that attackers have changed.
        newest=None if still else (examples, own),
    )
    if examples.sampling.weights is not None:
        # Over a network the other clients have no examples here.
        for part in filter(len, own):
            examples.sampling.of(part)
    attackers = _attackers(conditions, len(own), seed)
    if attackers is not None and attackers.attack.poisons:
        if task.trainer is not None:
            raise ValueError(
                f"the attack {attackers.attack} spoils examples, which trainers read by "
                "themselves: use an attack on updates"
            )
        # Data are spoilt once, so data poisoners are the same in all rounds (`Conditions` checks
        # this).
        examples, own = poisoned(examples, own, attackers.of(0), attackers.attack)
    algorithm = strategy.algorithm_for(task, model, len(own))
    # Without a reader of single updates, an engine need not form them. Readers are: attacks, which
    # forge updates; `answer` and `step`, which may read them; user-level clipping, which bounds
    # each update; and the recorder, which writes them.
    looks = (
        algorithm.answers
        or algorithm.has_own_step
        or attackers is not None
        or strategy.privacy.user is not None
        or keep is not None
    )
    sums = not looks and strategy.rule().sums
    synchronous = strategy.pacing(len(own)).synchronous
    example = strategy.privacy.example
    noised = None if example is None else StepNoise(example, secret)
    objective = algorithm.objective if algorithm.has_own_objective else None
    engines = _engines(
        strategy, task, one_more, examples, seed, conditions, synchronous, sums, noised, objective
    )
    training = LocalTraining(
        data=ClientData(examples, own, has.names, None if still else conditions.arrival.present),
        work=replace(
            strategy.work(),
            needs_two=needs_two(model, examples),
            partial=strategy.sends_partial_work,
        ),
        algorithm=algorithm,
        lr_schedule=task.lr_schedule,
        seed=seed,
    )
    return FederatedClients(
        training,
        # Read torch's thread count before a run lowers the count for the steps of single clients.
        RunEngine(engines, torch.get_num_threads()),
        personal,
        protections.client_protections_of(strategy, task, model, training, secret, site),
        attackers,
        keep,
    )


def _models(task: Task, model: nn.Module, seed: int) -> Callable[[], nn.Module]:
    """Return a factory of models equal to the run's present model."""
    # Engines are made later, when a forward pass may have changed the buffers of the run's model.
    fresh = unused_copy(model, task, seed)
    # Jobs carry trained weights alone, so all models here need the frozen weights of the run. These
    # share the run's memory: a resumed run loads the frozen weights of its checkpoint into it.
    frozen = frozen_of(model)
    device = device_of_model(model)

    def one_more() -> nn.Module:
        # A model that cannot be copied is made anew, wherever the task makes it.
        made = unused_copy(fresh, task, seed).to(device)
        load_frozen(made, frozen)
        return made

    return one_more


def _engines(
    strategy: FederatedSettings,
    task: Task,
    one_more: Callable[[], nn.Module],
    examples: Examples,
    seed: int,
    conditions: Conditions,
    together: bool,
    sums: bool,
    noised: StepNoise | None,
    objective: Objective | None,
) -> MakeEngine:
    """Return a factory of engines; together, sums, noised, objective: as in `EngineInputs`."""

    # The factory is called when jobs exist, perhaps again after `close`: each engine gets its own
    # model to change.
    def engine(
        jobs: Sequence[ClientJob], chosen: str | None, chunk: int, threads: int | None
    ) -> ClientEngine:
        return strategy.engine(
            EngineInputs(
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
                device=conditions.device,
            )
        )

    return engine


def _attackers(conditions: Conditions | None, clients: int, seed: int) -> Attackers | None:
    """Return the malicious clients; None without attackers, or if they are unknown."""
    if conditions is None or not conditions.attackers:
        return None
    return Attackers(
        conditions.attack, clients, conditions.attackers, conditions.attackers_change, seed
    )


def _tell_strangers(task: Task, names: Sequence[str] | None) -> None:
    """Warn about test examples with keys that no client has."""
    if names is None or task.test is None or task.test.keys is None or task.train.keys is None:
        return
    missing = unowned_keys(task.train.keys, task.test.keys)
    if missing:
        some = ", ".join(map(name_of, missing[:5])) + (", ..." if len(missing) > 5 else "")
        warn(
            f"{len(missing)} keys of the test data belong to no client ({some}): these test "
            "examples are not used"
        )
