"""The server of a federation: the global model, requests to clients, and results.

    repeat: the coordinator makes assignments; a carrier takes them to the clients and their updates
        back; the coordinator makes a new model of the updates

The server knows of its clients only their messages (`dure.protocol.messages`), and of the carrier
only that it delivers them. Local and remote clients make no difference here. `FederatedServer`
resumes from its own checkpoint; the state of clients belongs to the clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import STOP, TRANSFER_BUDGET_SPENT, Learner, StepResult
from dure.contracts.metric import ratio
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.keys import client_label
from dure.errors import RunFolderError, TooFewClientsError, warn
from dure.federated.aggregate import Aggregator
from dure.federated.algorithm import Algorithm
from dure.federated.server.client_metrics import ClientMeasurements, valid_measurements
from dure.federated.server.combining import RoundResult
from dure.federated.server.coordinator import Coordinator
from dure.federated.server.cost import ClientCosts
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.idle_time import idle_seconds
from dure.federated.server.known_losses import KnownLosses
from dure.federated.server.log import Log
from dure.federated.server.pacing import Pacing
from dure.federated.server.participation import Participation
from dure.federated.server.poisson_sampling import PoissonSampler
from dure.federated.server.privacy_interfaces import ExamplePrivacyAccount, PrivateAggregation
from dure.federated.server.secure_sums import SecureSummation
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.server.update_validation import same_shapes
from dure.fleet.attacks import Attack
from dure.fleet.malicious import Attackers
from dure.machine.devices import device_of_model, to_cpu, to_device
from dure.protocol.carrier import STEP, AssignmentRecord, Carrier
from dure.protocol.messages import EvaluationRequest, EvaluationResults, UpdateOutcomes
from dure.record.meter import Meter
from dure.tasks.batch_norm import statistics
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import most_counted
from dure.tasks.modes import in_mode
from dure.tensors.buffers import (
    BufferNames,
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import FrozenSnapshot, frozen_of

VERSION = 2
"""Version of the state in checkpoints.

Version 1, of dure up to 0.1.0, had no version number.
"""

MOST_METERS = 1_000
"""Largest number of clients with a meter each; more clients share a meter."""


class ServerSettings(Protocol):
    """Settings that the server reads; `dure.federated.strategy.Federated` documents them."""

    @property
    def batch_size(self) -> int | None: ...
    @property
    def freeze_at(self) -> int | None: ...

    def algorithm_for(self, task: Task, model: nn.Module, clients: int) -> Algorithm: ...
    def pacing(self, clients: int) -> Pacing: ...
    def optimizer(self) -> ServerOptimizer: ...
    def names(self, task: Task) -> list[str] | None: ...


class ServerProtections(NamedTuple):
    """Privacy protections on the server's side.

    Args:
        rule: rule that combines the updates, or their secure sums.
        secure: secure aggregation; None if clients send their updates.
        private: user-level differential privacy; None without it.
        examples: privacy account of the clients' examples; None without dp-sgd.
        sample_clients: samples the clients of a round, if the pacing samples them independently.
        exposure: information that each party could learn, for the report.
        repeats: whether the run is reproducible bit for bit.
    """

    rule: Aggregator
    secure: SecureSummation | None
    private: PrivateAggregation | None
    examples: ExamplePrivacyAccount | None
    sample_clients: PoissonSampler
    exposure: Sequence[tuple[str, str]]
    repeats: bool


class FederatedServer(Learner):
    """A learner whose step makes a new global model.

    Args:
        strategy: the strategy of the run.
        task: the task of the run.
        model: the run's model, which gives the initial weights.
        carrier: transport between server and clients.
        group: of this process; its meter is the server's.
        seed: of the run.
        protections: privacy protections, and the rule that combines what the server gets.
        attackers: the malicious clients of a simulation, for the report; None if unknown.
    """

    where = "server"

    def __init__(
        self,
        strategy: ServerSettings,
        task: Task,
        model: nn.Module,
        *,
        carrier: Carrier,
        group: Group,
        seed: int,
        protections: ServerProtections,
        attackers: Attackers | None = None,
    ) -> None:
        sizes = carrier.join().sizes
        train, self.test = examples_for(task)
        sample = self.test or train
        self.sample = sample if len(sample) else None
        """Examples for counting the operations of a step; None without data."""
        algorithm = strategy.algorithm_for(task, model, len(sizes))
        pacing = strategy.pacing(len(sizes))
        self.task = task
        self.model = model
        self.algorithm = algorithm
        self.carrier = carrier
        self.exposure = protections.exposure
        self.repeats = protections.repeats
        self.secure = protections.secure
        self.group = group
        self.batch_size = strategy.batch_size
        self.attack = None if attackers is None else attackers.attack
        self.flat = FlatParameters(model)
        self.frozen = FrozenSnapshot(model)
        self.buffers = BufferNames(model)
        # The averages of `Task.ema`: a copy, because others may use the weights of the global
        # model.
        self.averaged = None if task.ema is None else self.flat.copy()
        # Copies: evaluation loads other weights and buffers into the run's model again and again.
        shared = algorithm.shared(self.flat.copy())
        buffers = [buffer.clone() for buffer in self.buffers.of(model)]
        self.private = protections.private
        self.example_account = protections.examples
        self.knows_sizes = True
        """Whether the server knows each client's number of examples."""
        self.coordinator = Coordinator(
            model=GlobalModel(
                shared,
                buffers,
                protections.rule,
                strategy.optimizer(),
                private=self.private,
                statistics=statistics(model, self.buffers.names),
            ),
            pacing=pacing,
            algorithm=algorithm,
            sizes=sizes,
            seed=seed,
            most_counted=most_counted(task.loss, task.train),
            answer_timeout=carrier.answer_timeout,
            patient=carrier.patient,
            tell=warn,
            sample_clients=None
            if not pacing.samples_independently
            else self._recorded_sampler(protections.sample_clients),
            losses=KnownLosses(self._ask_losses if pacing.asks else None),
        )
        self.units_per_epoch = pacing.models_per_epoch(len(sizes))
        self.meter = group.meter
        self.meter.name = "server"
        # In a simulation participation is no secret: it follows from the seed.
        open = self.private is None or self.private.repeats
        self.names = strategy.names(task)
        self.counted = _meters(len(sizes), self.names, together=not open)
        self.log = Log(None if attackers is None else attackers.of, names=open)
        self.taking_part = Participation(self.who)
        self._told_refused = False
        self._told_vain = False
        self._told_cut = False
        self.said = ClientMeasurements(task.measures)
        self._told_failed = False
        self.freeze_at = strategy.freeze_at
        self.cost: ClientCosts | None = None
        """Costs of the clients, in a simulation."""
        self.earlier: tuple[list[Tensor], list[Tensor]] | None = None
        """Weights and buffers of the model of round `freeze_at`, once it exists."""
        self._freeze()

    def _recorded_sampler(self, sample_clients: PoissonSampler) -> PoissonSampler:
        """Return the sampler with a notice to differential privacy before any client is asked."""

        def tossed(number: int) -> list[int]:
            chosen = sample_clients(number)
            if self.private is not None:
                self.private.asks(number, chosen)
            return chosen

        return tossed

    def _ask_losses(self, clients: Sequence[int]) -> list[float]:
        model = self.coordinator.model
        return self.carrier.losses(clients, model.weights, model.buffers)

    def flops_per_step(self) -> float:
        # A step of a client of mean size: clients with fewer examples than a batch make smaller
        # steps.
        if self.sample is None:  # nothing is computed here
            return 0.0
        sizes = self.coordinator.sizes
        typical = sum(sizes) / len(sizes) if self.knows_sizes else self.batch_size or 0
        if not typical:
            return 0.0
        return flops_per_step(self.model, self.sample, min(self.batch_size or typical, typical))

    # The next model

    def advance(self, control_flags: int) -> StepResult:
        """Make a new global model: assignments out, local training, updates back, aggregation."""
        coordinator = self.coordinator
        number = coordinator.model.number
        # The run's model is not read before the next evaluation or checkpoint.
        self.flat.release()
        # A step replaces the weights and does not change them, so this stays the model before.
        before = coordinator.model.weights
        started = time.perf_counter()
        combine = self.carrier.carry(coordinator)
        if self.secure is None:
            self._fold(combine.tickets)
        elif combine.tickets:
            self._sum(combine.tickets, self.secure)
        trained = time.perf_counter()
        self._worked("local training", started, trained, number + 1)
        # Clients learn the outcome only after `finish`, which may refuse all updates (too few for
        # the rule): a refused client must not store its new state.
        result = coordinator.finish(self.carrier.now)
        refused = result.refused
        kept = [ticket for ticket in combine.tickets if ticket not in refused]
        self.carrier.settle(UpdateOutcomes(kept, list(refused), list(refused.values())))
        model = coordinator.model
        self.carrier.made(model.number, model.weights, model.buffers)
        self._worked("aggregate", trained, time.perf_counter(), number + 1)
        # Late and failed assignments since the last model count too: they cost bytes and time.
        flown = self.carrier.flown
        self.carrier.flown = []
        self._count(flown)
        if self.cost is not None:
            self.cost.count(number + 1, flown)
        self.log.flew(flown, result)
        self._take_part(number, result)
        self._tell(number, result)
        if self.log.liars is not None:
            self.log.moved(number, before, coordinator.model.weights)
        self._freeze()
        self._follow()
        if self.secure is not None:
            self._check_able(self.secure.fewest)
        if self._is_spent():
            control_flags |= STOP | TRANSFER_BUDGET_SPENT
        return StepResult(result.loss, result.samples, control_flags, self._numbers(flown, result))

    def _take_part(self, number: int, result: RoundResult) -> None:
        """Count the clients in a model, and warn of clients that have left."""
        coordinator = self.coordinator
        told = self.taking_part.made(
            number + 1,
            result.clients if self.log.names else None,
            coordinator.sizes,
            coordinator.present,
            self.knows_sizes,
        )
        if told is not None:
            warn(told)

    def _worked(self, what: str, start: float, end: float, number: int) -> None:
        """Record work of the server.

        Next to the clients' virtual seconds, in which the server takes no time, the machine's
        seconds are drawn and not added up.
        """
        if self.carrier.clock_is == "virtual_seconds":
            self.meter.mark(what, "compute", start, end, number)
        else:
            self.meter.compute(what, start, end, number)

    def _is_spent(self) -> bool:
        """Return whether the clients' transfer budgets leave too few updates for another model."""
        coordinator = self.coordinator
        left = self.carrier.answers_left(coordinator.synchronous)
        return left < max(coordinator.minimum, 1)

    def _fold(self, tickets: Sequence[int]) -> None:
        """Fold the updates of these assignments, one after another."""
        coordinator = self.coordinator
        looks = self.log.liars is not None
        # An update that was computed in this process, and is sent unchanged, needs no further
        # check. Its engine has checked the weights, though not the buffers.
        checked = self.carrier.checked
        as_computed = checked and not self.algorithm.answers
        for update in self.carrier.updates(coordinator, tickets):
            plain = not update.buffers
            # Engines do not check buffers: an update with buffers is checked here.
            taken = coordinator.fold(
                update, finite=checked and plain, computed=as_computed and plain
            )
            if looks:
                self.log.saw(update.client, update.round, taken)
            # Free the memory of this update before the next.
            del update, taken

    def _sum(self, tickets: Sequence[int], secure: SecureSummation) -> None:
        """Fold the secure sums of these assignments' updates, which stay with their clients."""
        coordinator = self.coordinator
        asked = {ticket: coordinator.assignment(ticket) for ticket in tickets}
        extras = next(coordinator.expects(one) for one in asked.values())
        self.carrier.hold(coordinator, tickets)
        sums = self.carrier.once(
            f"sum {coordinator.model.number}",
            lambda: secure.sums_of(asked, extras, self.carrier.exchange, self.carrier.draft),
        )
        self._leave_out(sums)
        means = list(secure.means(sums, asked, extras))
        for summed in means:
            coordinator.fold_sum(summed)
        if means and not self.knows_sizes and self.private is None:
            # Sizes are unknown: estimate them by the mean size in the sums.
            typical = sum(one.examples for one in means) / sum(len(one.tickets) for one in means)
            self.examples = max(1, round(typical * len(coordinator.sizes)))
        for ticket, reason in sums["lost"].items():
            coordinator.lost(ticket, reason)

    def _leave_out(self, sums: Mapping[str, Any]) -> None:
        """Exclude or pause clients as the secure sums require.

        Recorded runs of dure up to 0.1 do not have this information.
        """
        coordinator = self.coordinator
        for client, reason in sums.get("guilty", {}).items():
            if client not in coordinator.excluded:
                coordinator.exclude(client, reason)
                warn(
                    f"round {coordinator.round + 1}: {self.who(client)} is excluded, because it "
                    f"has violated the protocol of secure aggregation: {reason} (summary.json "
                    "names all, under excluded)"
                )
        coordinator.sit_out(sums.get("helped", ()))

    def _check_able(self, fewest: int) -> None:
        """Raise TooFewClientsError if no secure sum is possible from this model any more."""
        coordinator = self.coordinator
        able = coordinator.assignable_clients
        if able >= fewest or not (coordinator.sitting_out or coordinator.excluded):
            return
        out = len(coordinator.sitting_out.difference(coordinator.excluded))
        excluded = len(coordinator.excluded)
        why = next(iter(coordinator.excluded.values()), "")
        raise TooFewClientsError(
            f"round {coordinator.round}: {able} of {len(coordinator.sizes)} clients are left for a "
            f"sum of at least {fewest}: {out} have helped to unmask a sum of this model, which has "
            f"not changed since, and contribute to no other, and {excluded} are excluded"
            f"{f' ({why})' if why else ''}: begin a run from other weights or with another seed, "
            f"and leave out who spoils sums"
        )

    def _tell(self, number: int, result: RoundResult) -> None:
        """Warn of the run's first refused client, first round without updates and first cut value.

        All are counted (`facts`), so that a long run warns once.
        """
        round = number + 1
        if result.cut and not self._told_cut:
            self._told_cut = True
            warn(
                f"round {round}: {result.cut:,} values of updates were outside the range of "
                "secure aggregation and were clipped: give a larger range (the history has the "
                "number of each round, as cut)"
            )
        if not result.refused:
            return
        if not self._told_refused and self.log.liars is None:
            self._told_refused = True
            reason = next(iter(result.refused.values()))
            others = "; the other updates count" if result.clients else ""
            who = self.who(result.wrong[0]) if self.log.names else "a client"
            warn(
                f"round {round}: the update of {who} is rejected: {reason}{others} (summary.json "
                "has the refusals of the whole run)"
            )
        if not self._told_vain and not result.clients:
            self._told_vain = True
            warn(
                f"round {round}: no update counts, so the model does not change; all "
                f"{len(result.refused)} were rejected: {next(iter(result.refused.values()))}",
            )

    def close(self) -> None:
        """End the run: warn of spent transfer budgets, and of last rounds without updates."""
        if self.private is not None:
            self.private.close()
        out = self.carrier.facts().get("out_of_transfers", ())
        if out:
            first = self.who(out[0][0])
            more = f" and {len(out) - 1} more" if len(out) > 1 else ""
            warn(
                f"{first}{more} have reached their transfer budget and are not asked any more "
                "(summary.json lists all, under out_of_transfers)"
            )
        vain = self.coordinator.updates.unsuccessful_models
        number = self.coordinator.model.number
        # Without rounds a single unsuccessful model is a single refused client.
        if not vain or (self.log.turns and vain == 1):
            return
        whole = "the initial one" if vain == number else f"that of round {number - vain}"
        reason, _ = self.log.refusals.most_common(1)[0]
        warn(
            f"no update counted in the last {vain} rounds, so the model is {whole}; most were "
            f"rejected for this reason: {reason}",
        )

    def who(self, client: int) -> str:
        """Return a client's number and name, for messages."""
        return client_label(client, self.names)

    def _count(self, flown: Sequence[AssignmentRecord]) -> None:
        """Count the bytes of both sides, and the seconds of the clients' devices."""
        # A single meter is either of a single client, or shared by too many clients
        # (`MOST_METERS`).
        together = len(self.counted) == 1
        for flight in flown:
            meter = self.counted[0 if together else flight.client]
            meter.answered(
                down=flight.down,
                up=flight.up,
                transfer=flight.transfer_seconds,
                compute=flight.compute_seconds,
            )
        until = self.carrier.now if self.coordinator.synchronous else None
        for client, seconds in idle_seconds(flown, until).items():
            self.counted[0 if together else client].counters.idle_seconds += seconds
        self.meter.exchanged(
            sent=[flight.down for flight in flown],
            received=[flight.up for flight in flown if flight.up],
        )

    def _numbers(self, flown: Sequence[AssignmentRecord], result: RoundResult) -> dict[str, float]:
        outcomes = [flight.outcome for flight in flown if flight.outcome != STEP]
        late = outcomes.count("late")
        staleness = result.staleness
        return {
            self.carrier.clock_is: self.carrier.now,
            "updates": float(len(result.clients)),
            "late": float(late),
            "failed": float(len(outcomes) - late - outcomes.count("accepted")),
            "refused": float(len(result.refused)),
            "staleness": sum(staleness) / len(staleness) if staleness else 0.0,
            **self.taking_part.shares,
            # With secure sums only: values that were beyond the range.
            **({} if result.cut is None else {"cut": float(result.cut)}),
            **({} if self.private is None else self.private.numbers()),
            **self._example_numbers(flown),
        }

    def _example_numbers(self, flown: Sequence[AssignmentRecord]) -> dict[str, float]:
        """Return numbers of the example-level privacy account, including these assignments."""
        if self.example_account is None:
            return {}
        self.example_account.asked(one.client for one in flown if one.outcome != STEP)
        return self.example_account.numbers()

    def exhausted(self) -> str | None:
        return None if self.private is None else self.private.exhausted()

    # Evaluation

    def evaluate(self) -> dict[str, float]:
        """Measure the global model.

        Returns the metrics of the test data, the success rate of a backdoor's trigger on test
        examples, and the metrics of clients. Raises ValueError if the measurement changes frozen
        parameters.
        """
        self._load_global()
        number = self.coordinator.model.number
        found = evaluate(self.task, self.model, self.test, self.group, number)
        self.frozen.check()
        has_test = self.test is not None and "test" in self.test.sets()
        if self.attack is not None and self.attack.triggers and self.test is not None and has_test:
            found["test_backdoor"] = self._turned(self.attack, self.test)
        # Clients get the server's weights, which may be a part of the model.
        weights = self._shown()
        buffers = self.coordinator.model.buffers
        frozen, frozen_buffers = self.earlier or ((), ())
        measure = EvaluationRequest(
            number, weights, buffers, self.carrier.now, frozen, frozen_buffers
        )
        said = valid_measurements(self.carrier.measure(measure), len(self.coordinator.sizes))
        self._tell_failed(said)
        return found | self.said.take(said)

    def _tell_failed(self, said: EvaluationResults) -> None:
        """Warn of the first client of the run that cannot measure; all are counted (`facts`)."""
        if not said.failures or self._told_failed or self.said.failed:
            return
        self._told_failed = True
        client, reason = next(iter(said.failures.items()))
        more = len(said.failures) - 1
        others = f", and {more} more cannot either" if more else ""
        warn(
            f"{self.who(client)} cannot measure: {reason}{others}; the clients' metrics do not "
            "include them (summary.json lists all, under not_measured)"
        )

    def _freeze(self) -> None:
        """Store the model of round `freeze_at`, for comparisons."""
        model = self.coordinator.model
        if model.number == self.freeze_at:
            # A step replaces weights and buffers and does not change them.
            self.earlier = (list(model.weights), list(model.buffers))

    @torch.no_grad()
    def _turned(self, attack: Attack, examples: Examples) -> float:
        """Return the share of test examples that a backdoor's trigger turns to its target class.

        Examples of the target class itself do not count.
        """
        turned = 0
        of = 0
        with in_mode(self.model, training=False):
            for part in torch.split(torch.arange(len(examples)), self.task.eval_batch_size):
                inputs, targets = to_device(examples.batch(part), device_of_model(self.model))
                some, among = attack.turned(self.model(attack.triggered(inputs)), targets)
                turned += some
                of += among
        return ratio(turned, of)

    def _load_global(self) -> None:
        model = self.coordinator.model
        # If a part of the model belongs to each client, the server has only the rest: clients
        # provide the mean of their parts, for evaluation.
        kept = self.carrier.kept().tensors if self.algorithm.divides else ()
        self.flat.load(self.algorithm.whole(self._shown(), kept))
        self.buffers.load(self.model, model.buffers)

    def averaged_tensors(self) -> dict[str, Tensor]:
        assert self.averaged is not None
        found: dict[str, Tensor] = {}
        for whole, named in zip(self.averaged, self.flat.names, strict=True):
            sizes = [math.prod(shape) for _, shape in named]
            for (name, shape), piece in zip(named, torch.split(whole, sizes), strict=True):
                found[name] = piece.view(shape)
        return found

    def _follow(self) -> None:
        """Copy the global model's weights to the weights that `Task.ema` averages."""
        if self.averaged is not None:
            for mine, now in zip(self.averaged, self.coordinator.model.weights, strict=True):
                mine.copy_(now)

    def _shown(self) -> list[Tensor]:
        """Return the weights that are evaluated and written: the average, while it is shown."""
        if self.averaged is None:
            return self.coordinator.model.weights
        return self.averaged

    # Checkpoints

    def weights(self) -> dict[str, Tensor]:
        self._load_global()
        weights: dict[str, Tensor] = to_cpu(dict(self.model.state_dict()))
        return weights

    def state(self) -> dict[str, Any]:
        """Return the state of the server, and the state of the carrier in a part of its own."""
        self._load_global()
        return {
            "version": VERSION,
            "server": {
                "coordinator": self.coordinator.state(),
                "log": self.log.state(),
                "taking_part": self.taking_part.state(),
                "measured": self.said.state(),
                "cost": None if self.cost is None else self.cost.state(),
                "frozen": None if self.earlier is None else list(map(list, self.earlier)),
                "private": None if self.private is None else self.private.state(),
                "examples": None if self.example_account is None else self.example_account.state(),
                "of_epoch": self.examples,
            },
            "carrier": self.carrier.state(),
            "buffers": non_persistent_buffers_of(self.model),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the model and the state of a checkpoint.

        Raises RunFolderError for the state of another version, and for a state with frozen
        parameters.
        """
        version = state.get("version", 1)
        if version != VERSION:
            raise RunFolderError(
                "the checkpoint was written by another version of dure (state version "
                f"{version}), and this one reads version {VERSION}: resume it with the version "
                "that wrote it"
            )
        # All tensors of a federation are on the model's device.
        state = to_device(dict(state), device_of_model(self.model))
        server = state["server"]
        written = server["coordinator"]["model"]["weights"]
        # Without frozen parameters such a state is the same.
        if frozen_of(self.model) and not same_shapes(written, self.coordinator.model.weights):
            raise RunFolderError(
                "the checkpoint was written by an older dure that also sent frozen parameters, "
                "and this one sends only trained ones: resume it with the version that wrote it"
            )
        self.flat.take_memory()
        load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.frozen = FrozenSnapshot(self.model)
        self.coordinator.restore(server["coordinator"])
        self.log.restore(server["log"])
        # Checkpoints of dure up to 0.1 do not have it.
        if "taking_part" in server:
            self.taking_part.restore(server["taking_part"])
        self.said.restore(server["measured"])
        # Checkpoints of dure up to 0.1 do not have it.
        frozen = server.get("frozen")
        self.earlier = None if frozen is None else (frozen[0], frozen[1])
        # Checkpoints of dure up to 0.1 do not have it.
        if self.cost is not None and server.get("cost") is not None:
            self.cost.restore(server["cost"])
        if self.private is not None:
            self.private.restore(server["private"])
        if self.example_account is not None:
            self.example_account.restore(server["examples"])
        if not self.knows_sizes:
            # Checkpoints of dure up to 0.1 do not have it.
            self.examples = server.get("of_epoch", self.examples)
        self.carrier.restore(state["carrier"])
        self._follow()
        model = self.coordinator.model
        self.carrier.made(model.number, model.weights, model.buffers)

    def ended(self, reason: str) -> None:
        self.carrier.ended(reason)

    def saved(self) -> None:
        self.carrier.saved()

    # For the report

    def facts(self) -> dict[str, Any]:
        """Return participation, outcomes and privacy, for the report."""
        private = {} if self.private is None else self.private.facts()
        excluded = sorted(self.coordinator.excluded.items())
        if self.example_account is not None:
            promised = self.example_account.facts()["promises"]
            private["promises"] = [*private.get("promises", ()), *promised]
        return {
            **self.carrier.facts(),
            **self.log.facts(),
            **self.taking_part.facts(),
            **({} if self.cost is None else self.cost.facts()),
            **self.said.facts(),
            **private,
            **self._bits(),
            **({"excluded": excluded} if excluded else {}),
            "exposure": [list(one) for one in self.exposure],
        }

    def _bits(self) -> dict[str, Any]:
        """Return that no run repeats the bits, for protected remote clients; else nothing."""
        told = self.carrier.facts()
        if "bits" not in told or self.repeats:
            return {}
        why = "what protects clients is drawn from the system, and never again"
        return {"bits": "close", "differs": [*told.get("differs", ()), why]}

    def meters(self) -> Sequence[Meter]:
        return [self.meter, *self.counted]


def _meters(clients: int, names: Sequence[str] | None, together: bool) -> list[Meter]:
    if clients <= MOST_METERS and not together:
        return [Meter(client_label(client, names)) for client in range(clients)]
    one = Meter(f"{clients} clients")
    one.stands_for = clients
    return [one]
