"""Train a dure task as one client of a federated strategy: the site's side of `dure.join`.

The server sets the strategy, the seed, the client's number and the number of clients. The training
equals that of a simulated client with the same number and examples, with the same random draws.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for, seeded_model, unused_copy
from dure.contracts.task import Task
from dure.data.bad_values import bad_values
from dure.deploy.client.evaluations import EvaluationBound
from dure.deploy.client.loop import TrainedAssignment
from dure.deploy.client.policy import Policy
from dure.deploy.client.session import NotWantedError, Session
from dure.errors import PolicyError
from dure.federated.builders import build_client, message_layout
from dure.federated.client.clients import FederatedClients
from dure.federated.engines.trainer import check_step, check_trained
from dure.federated.protections import SecureClientContext
from dure.federated.server.pacing import Pacing
from dure.federated.strategy import Federated
from dure.fleet.conditions import Conditions, EngineName
from dure.machine.devices import (
    check_device_dtypes,
    device_of_model,
    set_current,
    to_cpu,
    to_device,
)
from dure.protocol.messages import (
    NOT_FINITE,
    Assignment,
    EvaluationRequest,
    ProtocolAnswer,
    ProtocolStep,
    Update,
    UpdateOutcomes,
    nbytes,
)
from dure.references import ReferencePolicy, refuse
from dure.run.registry import decode_strategy
from dure.tasks.dtypes import check_dtypes
from dure.tasks.gradient_transforms import forward_context
from dure.tasks.loss_shares import tensor_of
from dure.tasks.task_summary import machine_of, trains_of
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters, trainable_parameters
from dure.tensors.frozen import frozen_of, load_frozen
from dure.wire.layout import ModelLayout, is_extra
from dure.wire.requests import (
    MOST_THREADS,
    VERSION,
    CheckIn,
    EvaluationReport,
    EvaluationTask,
    Machine,
    TaskDescription,
    Train,
    UpdateOutcome,
    UploadRequest,
    Welcome,
)
from dure.wire.tensors import TensorSpec, digest_of, forms_of, size_of

ENGINE: EngineName = "loop"
"""Engine of clients on a network."""


@dataclass
class ClientTraining:
    """A dure task, trained as one client of a federated strategy.

    Args:
        part: the simulated client whose examples are used; None uses all of the task's examples.
        policy: the site's policy.
        evaluations: the evaluated models, if the policy limits them; else None.
        sums: the client's knowledge for secure sums of updates; by default only the run and the
            policy.
        ask: resolves the site's own code that the server names; by default refuses all.
        computes_on: device of the model; None leaves the model where the task makes it.

    Raises ValueError for a task without training data, which would occupy a place without training.
    """

    task: Task
    name: str
    part: int | None = None
    folder: Path | None = None
    examples: int = 0
    held_out: int = 0
    threads: int = 1
    holds: bool = False
    policy: Policy = field(default_factory=Policy)
    evaluations: EvaluationBound | None = None
    sums: SecureClientContext | None = None
    ask: ReferencePolicy = refuse
    computes_on: torch.device | None = None
    _began: dict[int, float] = field(default_factory=dict)
    _told_bad: bool = False

    def __post_init__(self) -> None:
        if not len(self.task.train):
            raise ValueError("the task has no training data, which a client needs")
        if self.task.validation is not None:
            raise ValueError(
                "the task has a validation set, but only the server of a federation evaluates on "
                "one: leave validation out of a client's task"
            )
        self.wants = self.part
        self.model: nn.Module = seeded_model(self.task, 0)
        if self.computes_on is not None:
            dtypes = {one.dtype for one in self.model.state_dict().values()}
            check_device_dtypes([self.computes_on.type], dtypes)
        check_dtypes(self.task, self.model, partial(unused_copy, self.model, self.task, 0))

    @property
    def share_errors(self) -> bool:
        return self.policy.share_errors

    def look(self) -> CheckIn:
        """Return a check-in that only looks at the served run."""
        return replace(self.enter(), looks=True)

    def enter(self) -> CheckIn:
        """Return a check-in that takes a place, without examples yet."""
        return CheckIn(
            version=VERSION, name=self.name, examples=0, wants=self.wants, trains=self.trains()
        )

    def trains(self) -> TaskDescription | None:
        return trains_of(self.task, self.model)

    def machine(self) -> Machine | None:
        return machine_of(ENGINE if self.task.trainer is None else "trainer", self.threads)

    def check(self, welcome: Welcome) -> None:
        """Check that a trainer of another library can make the steps of the served run.

        Raises ValueError.
        """
        if self.task.trainer is None:
            return
        strategy = decode_strategy(welcome.strategy, self.ask)
        trainer = self.task.trainer.of(0)
        if isinstance(strategy, Federated):
            check_trained(strategy, trainer)
            check_step(trainer, strategy.batch_size, trainer.examples)

    def begin(self, welcome: Welcome, memory: Sequence[Tensor] | None) -> None:
        strategy = decode_strategy(welcome.strategy, self.ask)
        if not isinstance(strategy, Federated):
            raise ValueError(f"{strategy.name} is not a federated system")
        strategy.check_settings()
        if self.part is not None and not 0 <= self.part < welcome.clients:
            last = welcome.clients - 1
            raise ValueError(f"part is {self.part}, but client numbers are 0 to {last}")
        # A look has no number yet.
        self.client = welcome.client if welcome.client >= 0 else self.part or 0
        # The user's bound limits the server's request, and the server is sent the result.
        self.threads = min(welcome.machine.threads, self.policy.cores or MOST_THREADS)
        # Also if the server omits it: the strategy's own settings promise secure sums.
        self.holds = welcome.holds or strategy.privacy.secure is not None
        self.model = seeded_model(self.task, welcome.seed)
        if self.computes_on is not None:
            self.model.to(self.computes_on)
        self.device = device_of_model(self.model)
        set_current(self.device)
        self.clients: FederatedClients = build_client(
            strategy,
            self.task.on(self.device),
            self.model,
            Conditions(engine=ENGINE),
            welcome.seed,
            self.client,
            welcome.clients,
            divides=self.part is not None,
            site=self.sums
            or SecureClientContext(
                welcome.run, _ignore, smallest_cohort=self.policy.smallest_cohort
            ),
        )
        self.layout: ModelLayout = message_layout(strategy, self.task, self.model, welcome.clients)
        self._forms = self.layout.forms(self._shared(), list(self.model.buffers()))
        self.examples = self.clients.data.sizes[self.client]
        measured = self.client in self.clients.personal.clients
        self.held_out = self.clients.personal.count(self.client) if measured else 0
        self._check_policy(strategy.pacing(welcome.clients))
        if self.policy.evaluation(self.held_out, 0):
            # The server does not ask clients without held-out examples for metrics.
            self.held_out = 0
        self.remember(memory)

    def _check_policy(self, pacing: Pacing) -> None:
        """Raise PolicyError if the policy forbids the work, or averages of so few updates."""
        reasons = [*self._beyond()]
        least = self.policy.smallest_cohort
        if not pacing.synchronous and pacing.minimum < least:
            reasons.append(
                f"policy.toml requires at least {least} clients in a new model; the run makes one "
                f"from every {pacing.minimum} updates"
            )
        if reasons:
            raise PolicyError(f"this site does not take part: {'; '.join(reasons)}")

    def _beyond(self) -> Iterator[str]:
        """Yield the settings of local work that exceed the site's policy."""
        local = self.clients.training.work
        asked = {
            "local_epochs": local.epochs,
            "local_steps": local.steps,
            "batch_size": local.batch_size,
            "fine_tune": self.clients.personal.fine_tune,
        }
        return self.policy.work(asked, self.examples)

    def forms(self) -> dict[str, TensorSpec]:
        """Return dtype and shape of each tensor of an assignment, by name."""
        algorithm = self.clients.algorithm
        weights = algorithm.shared(FlatParameters(self.model).copy())
        return self.layout.forms(weights, BufferNames(self.model).of(self.model), algorithm.down())

    def take_frozen(self, session: Session, welcome: Welcome) -> None:
        """Replace the client's frozen weights by the server's, if they differ.

        Weights drawn under the same seed may differ between processors.
        """
        served = welcome.trains.frozen
        own = to_cpu(frozen_of(self.model))
        if served is None or served == digest_of(own):
            return
        size = welcome.trains.frozen_bytes
        tensors = session.fetch_frozen(served, size, forms_of(own))
        load_frozen(self.model, tensors)

    def would_send(self) -> int:
        """Return the bytes of the tensors of an update."""
        algorithm = self.clients.algorithm
        weights = self._shared()
        # An algorithm's extra tensors have the same size in both directions (`Algorithm.expects`).
        sent = [*weights, *self.model.buffers(), *algorithm.down()]
        return sum(one.nbytes for one in sent)

    def _shared(self) -> Sequence[Tensor]:
        """Return the weights that travel."""
        return self.clients.algorithm.shared(FlatParameters(self.model).copy())

    def one_step(self) -> float:
        """Train a copy of the model on one batch, and return the seconds."""
        model = copy.deepcopy(self.model)
        optimizer = self.task.optimizer(trainable_parameters(model))
        own = self.clients.data.parts[self.client][
            : self.clients.training.work.batch(self.examples)
        ]
        examples = examples_for(self.task)[0]
        inputs, targets = to_device(examples.batch(own), self.device)
        started = time.perf_counter()
        with forward_context(self.task, self.device):
            loss = self.task.on(self.device).loss(model(inputs), targets)
        torch.autograd.backward(tensor_of(loss))
        optimizer.step()
        return time.perf_counter() - started

    def train(
        self, train: Train, tensors: Mapping[str, Tensor], wanted: Callable[[], bool]
    ) -> TrainedAssignment:
        reasons = [*self._beyond()]
        if reasons:
            raise PolicyError(
                f"this site does not train in round {train.round + 1}: {'; '.join(reasons)}"
            )

        def look() -> None:
            if not wanted():
                raise NotWantedError

        self.clients.engine.look = look
        assignment = self._assignment(train, tensors)
        started = time.perf_counter()
        update = self.clients.receive(assignment)
        assert isinstance(update, Update)
        seconds = time.perf_counter() - started
        if update.failure in NOT_FINITE:
            self._tell_bad_values()
        if update.failure is None and (train.holds or self.holds):
            self.clients.hold(update, assignment)
        named: dict[str, Tensor] = {}
        if update.failure is None:
            named = to_cpu(self.layout.named(update.delta, update.buffers, update.extra))
        reserve = UploadRequest(
            ticket=train.ticket,
            bytes=size_of(forms_of(named)) if named else 0,
            digest=digest_of(named) if named else "",
            examples=update.examples,
            samples=update.samples,
            loss=update.loss,
            counted=update.counted,
            failure=update.failure,
            seconds=seconds,
            steps=update.steps,
        )
        memory = to_cpu(self.clients.keeps(train.ticket))
        # A skipped update is sent nowhere, and must not replace the last one that entered a sum.
        keep = not self.clients.sits_out(train.ticket)
        return TrainedAssignment(reserve, named, memory, keep)

    def _tell_bad_values(self) -> None:
        """Warn once of bad values in this site's data; the server does not learn the columns."""
        found = None if self._told_bad else bad_values(self.task.train, self.task.features)
        self._told_bad = True
        if found is not None:
            warnings.warn(
                f"this site's training data contain invalid values: {found}", stacklevel=2
            )

    def _assignment(self, train: Train, tensors: Mapping[str, Tensor]) -> Assignment:
        """Return the assignment as in a simulation. Raises ValueError for another model."""
        # Otherwise weights of a wider dtype would have another digest, but would be rounded to the
        # same weights in training.
        found = {name: form for name, form in forms_of(tensors).items() if not is_extra(name)}
        if found != self._forms:
            differs = sorted(
                name for name in {*found, *self._forms} if found.get(name) != self._forms.get(name)
            )
            raise ValueError(
                f"the server's model differs from this task's model: {differs[0]!r} is missing, "
                "unknown, or has another dtype or shape"
            )
        weights, buffers, extra = self.layout.apart(to_device(dict(tensors), self.device))
        return Assignment(
            ticket=train.ticket,
            client=self.client,
            round=train.round,
            turn=train.turn,
            weights=weights,
            buffers=buffers,
            nbytes=nbytes(weights) + nbytes(buffers) + nbytes(extra),
            extra=extra,
        )

    def hold(
        self,
        train: Train,
        tensors: Mapping[str, Tensor],
        reserve: UploadRequest,
        update: Mapping[str, Tensor],
    ) -> None:
        delta, buffers, extra = self.layout.apart(to_device(dict(update), self.device))
        held = Update(
            ticket=train.ticket,
            client=self.client,
            round=train.round,
            examples=reserve.examples,
            samples=reserve.samples,
            loss=reserve.loss,
            delta=delta,
            buffers=buffers,
            extra=extra,
            counted=reserve.counted,
            steps=reserve.steps,
        )
        self.clients.hold(held, self._assignment(train, tensors))

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        return self.clients.answer(say)

    def measure(self, measure: EvaluationTask, tensors: Mapping[str, Tensor]) -> EvaluationReport:
        refusal = ""
        if self.evaluations is not None:
            has = self.clients.personal.count(self.client)
            refusal = self.evaluations.refusal(measure.round, measure.tensors, has)
        if refusal:
            return EvaluationReport(measure.round, failure=refusal)
        weights, buffers, _ = self.layout.apart(to_device(dict(tensors), self.device))
        with torch.no_grad():
            measured = self.clients.measure(EvaluationRequest(measure.round, weights, buffers, 0.0))
        failure = measured.failures.get(self.client, "")
        if self.client not in measured.clients:
            return EvaluationReport(measure.round, failure=failure)
        place = list(measured.clients).index(self.client)
        return EvaluationReport(
            round=measure.round,
            values={name: each[place] for name, each in measured.values.items()},
            examples={name: each[place] for name, each in measured.examples.items()},
            sums={name: list(each[place]) for name, each in measured.sums.items()},
            forms=dict(measured.forms),
            failure=failure,
        )

    def settle(self, outcome: UpdateOutcome) -> None:
        tickets = [outcome.ticket]
        self.clients.settle(
            UpdateOutcomes(tickets, []) if outcome.kept else UpdateOutcomes([], tickets)
        )

    def remember(self, memory: Sequence[Tensor] | None) -> None:
        if memory is not None:
            self.clients.memories[self.client] = to_device(list(memory), self.device)


def _ignore(reason: str) -> None:
    pass
