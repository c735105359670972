"""Loop engine: train one client after another, by autograd; the reference of all engines.

All clients share a single model. Its parameters are views of a flat buffer, so that loading the
weights and forming the update are a single operation each. Every job has a new optimizer state,
because the paper's clients keep nothing between rounds: momentum starts from zero.

If the optimizer treats each element independently (SGD, Adam and others of torch), a small model's
gradients are copied into a flat buffer, and the optimizer has a single parameter instead of many:
the same bits from a few calls. Large models are not copied: there the calls cost little compared
with the copy. Neither are models with plain SGD, which is a single call anyway (`optimizers`), nor
models whose optimizer has hooks, which see the original parameters.

In float16 a step is repeated until its gradient is finite (`dure.tasks.loss_scaling`), so that a
client makes all the steps that it is asked for.

A task's `clip_norm` applies to each local step's gradient, including the algorithm's terms, and its
`unfreeze` counts rounds.

With `noised` a client's steps are DP-SGD's (`noised`); with a custom objective clients minimise
that objective (`objective`).

Source: McMahan et al. 2017, algorithm 1, ClientUpdate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.lr_schedule import scale
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import DureError, WorkerFailedError, described
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult, loss_failure, not_finite
from dure.federated.engines.noised import NoisedSteps, StepNoise
from dure.federated.engines.objective import CustomObjective, Objective
from dure.federated.engines.optimizers import PlainSGD, is_plain, optimizer_of
from dure.federated.engines.plan import batches
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import seed_generators
from dure.tasks.gradient_transforms import GradientTransforms, forward_context
from dure.tasks.loss_scaling import RepeatedPasses
from dure.tasks.loss_shares import ComputedLoss, CountedLoss
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters, by_dtype, trainable_parameters, views_of
from dure.tensors.frozen import FrozenSnapshot
from dure.tensors.optimizer_state import has_step_hooks

SMALL_MODEL = 1 << 18
"""Largest number of elements for copying gradients into a flat buffer."""

_BY_ELEMENT: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)
"""Optimizers that treat each element independently, and create their state in the first step."""


class LoopEngine(ClientEngine):
    """Engine that trains one client after another.

    Args:
        task: the task of the run.
        model: a new model, which becomes the engine's.
        examples: of all clients, in the model's dtype.
        batch_size: of a client's step; None is all of its data.
        seed: of the run.
        noised: example-level privacy; None without it.
        objective: the loss that clients minimise; None is the task's.
    """

    name = "loop"

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        examples: Examples,
        batch_size: int | None,
        seed: int,
        noised: StepNoise | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.noised: NoisedSteps | None = None
        if noised is not None:
            self.noised = NoisedSteps(noised, task, model, examples, batch_size)
        self.task = task
        self.model = model
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self.losses = CountedLoss(task.loss, examples)
        self.objective = (
            None
            if objective is None
            else CustomObjective(objective, self.losses, task, model, seed)
        )
        self.flat = FlatParameters(model)
        self.frozen = FrozenSnapshot(model)
        self.buffers = BufferNames(model)
        self.parameters = list(model.parameters())
        # As of now: a forward pass may freeze some parameters later.
        self.groups = list(by_dtype(trainable_parameters(model)).values())
        self.device = device_of_model(model)
        self.updates: _Updates = _flat_updates(task, self.parameters, self.flat) or _Updates(
            task, dict(model.named_parameters())
        )

    def train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Yield the results in the jobs' order, each computed on demand.

        A client whose loss or weights are not finite has a failure as its result. Raises
        WorkerFailedError, with the client's name, if user code raises.
        """
        for job in jobs:
            try:
                trained = self._train(job)
            except _NoGradientError:
                # An optimizer skips a parameter without a gradient, which a single flat parameter
                # cannot do. From now on parameters stay separate; the job restarts, with the same
                # random draws.
                self.updates = _Updates(self.task, dict(self.model.named_parameters()))
                trained = self._train(job)
            yield trained

    def _train(self, job: ClientJob) -> JobResult:
        losses: list[Tensor] = []
        counts: list[float] = []
        gradient: list[Tensor] | None = None
        try:
            self._load(job)
            if job.measures is not None:
                samples, gradient = self._measured(job, losses, counts)
            elif self.noised is None:
                samples = self._steps(job, losses, counts)
            else:
                samples = self._noised_steps(self.noised, job, losses, counts)
        except (DureError, _NoGradientError, KeyboardInterrupt):
            raise
        except BaseException as error:
            # A loss that was not finite before the error is the more likely cause, and is reported
            # instead.
            failure = loss_failure(_values(losses))
            if failure is None:
                raise client_error(job, error) from error
            return not_finite(failure)
        check_frozen(self.frozen, job)
        values = _values(losses)
        failure = loss_failure(values)
        if failure is not None:
            return not_finite(failure)
        # The next loss reveals weights that are not finite; after the last step only this check
        # does.
        if not all(bool(weights.isfinite().all()) for weights in self.flat.buffers):
            return not_finite("its weights became not finite")
        pairs = zip(self.flat.buffers, job.weights, strict=True)
        delta = [now - before for now, before in pairs] if gradient is None else gradient
        buffers = self.buffers.of(self.model) if gradient is None else job.buffers
        counted = sum(counts)
        total = sum(value * count for value, count in zip(values, counts, strict=True))
        return JobResult(
            delta=delta,
            buffers=[buffer.clone() for buffer in buffers],
            samples=samples,
            loss=total / counted if counted else 0.0,
            counted=counted,
        )

    def _load(self, job: ClientJob) -> None:
        self.flat.load(job.weights)
        self.buffers.load(self.model, job.buffers)

    def _steps(self, job: ClientJob, losses: list[Tensor], counts: list[float]) -> int:
        """Run the steps of the job and return the number of their examples.

        losses, counts: lists that receive the loss and the counted weight of each step.
        """
        self.model.train()
        step = self.updates.begin(job)
        backward = self._backward()
        samples = 0
        for batch in self._batches(job):
            loss, counted = backward(batch)
            # Not converted to a number yet: the conversion would wait for a GPU in every step.
            losses.append(loss)
            counts.append(counted)
            step()
            samples += len(batch)
        return samples

    def _backward(self) -> Callable[[Tensor], ComputedLoss]:
        """Return the function that computes the loss and the gradient of a step of a job.

        It takes the indices of the examples. The returned loss has no graph.
        """
        passes = RepeatedPasses(self.task, self.model, self.device)

        def once(batch: Tensor) -> ComputedLoss:
            loss, counted = self._loss(batch)
            passes.backward(loss)
            return ComputedLoss(loss.detach(), counted)

        return lambda batch: passes.run(
            lambda: once(batch), lambda _: [one.grad for one in self.parameters]
        )

    def _batches(self, job: ClientJob) -> Sequence[Tensor]:
        """Return the examples of each step, as indices, and seed the generators."""
        order, sizes = batches(job, self.batch_size, self.seed, sampling=self.examples.sampling)
        # Before seeding, because building a model may draw random numbers.
        if self.objective is not None:
            self.objective.begin(job)
        seed_generators(self.seed, "client", job.turn, job.client, everything=self.examples.draws)
        parts: Sequence[Tensor] = torch.split(order, list(sizes))
        return parts

    def _loss(self, batch: Tensor) -> ComputedLoss:
        """Return the loss of a step, and its counted weight. batch: indices of its examples."""
        if self.look is not None:
            self.look()
        inputs, targets = self.examples.batch(batch)
        if self.device.type != "cpu":
            inputs, targets = to_device((inputs, targets), self.device)
        # None and not 0: autograd then writes gradients without adding, and a missing gradient
        # shows.
        for parameter in self.parameters:
            parameter.grad = None
        with forward_context(self.task, self.device):
            if self.objective is not None:
                return self.objective.of(inputs, targets, len(batch))
            return self.losses.mean(self.model(inputs), targets, len(batch))

    def _measured(
        self, job: ClientJob, losses: list[Tensor], counts: list[float]
    ) -> tuple[int, list[Tensor]]:
        """Run the steps of a measuring job; return (number of examples, gradient or zeros)."""
        if self.noised is not None:
            raise ValueError(
                "dp-sgd: a client would measure its loss without noise, which is not allowed"
            )
        gradients = job.measures == "gradient"
        self.model.train(gradients)
        backward = self._backward()
        total = [torch.zeros_like(weights) for weights in self.flat.buffers]
        samples = 0
        with torch.set_grad_enabled(gradients):
            for batch in self._batches(job):
                loss, counted = backward(batch) if gradients else self._loss(batch)
                losses.append(loss.detach())
                counts.append(counted)
                samples += len(batch)
                if gradients and counted:
                    for sum_, own in zip(total, self._gradient(), strict=True):
                        sum_.add_(own, alpha=counted)
        return samples, [sum_.div_(sum(counts) or 1.0) for sum_ in total]

    def _gradient(self) -> list[Tensor]:
        """Return the present gradients, flat like weights."""
        return [
            torch.cat([_dense(parameter).reshape(-1) for parameter in group])
            for group in self.groups
        ]

    def _noised_steps(
        self, noised: NoisedSteps, job: ClientJob, losses: list[Tensor], counts: list[float]
    ) -> int:
        """Run the steps of DP-SGD; return the expected, not the sampled number of examples."""
        seed_generators(self.seed, "client", job.turn, job.client, everything=self.examples.draws)
        self.model.train()
        step = self.updates.begin(job)
        coins = noised.batches(job)
        for number in range(job.steps):
            if self.look is not None:
                self.look()
            chosen = coins.at(number)
            batch = None
            if len(chosen):
                read = self.examples.batch(job.indices.index_select(0, chosen))
                batch = to_device(read, self.device)
            sums, loss = noised.clipped(batch)
            noised.leave(sums, coins.batch_size, job, number)
            losses.append(torch.tensor(loss))
            counts.append(float(coins.batch_size) if batch is not None else 0.0)
            step()
        return job.steps * coins.batch_size


def _dense(parameter: nn.Parameter) -> Tensor:
    """Return the parameter's gradient; zeros if it took no part in the loss."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def check_frozen(frozen: FrozenSnapshot, job: ClientJob) -> None:
    """Raise WorkerFailedError if training has changed frozen parameters."""
    changed = frozen.changed()
    if changed is not None:
        raise WorkerFailedError(job.who, f"round {job.round + 1}", changed)


def client_error(job: ClientJob, error: BaseException) -> WorkerFailedError:
    """Return the error that reports an exception of user code."""
    return WorkerFailedError(job.who, f"round {job.round + 1}", described(error))


def _values(losses: Sequence[Tensor]) -> list[float]:
    """Return the losses as numbers, read at once: every read would wait for a GPU."""
    if not losses:
        return []
    values: list[float] = torch.stack([loss.reshape(()) for loss in losses]).tolist()
    return values


class _NoGradientError(Exception):
    """Raised for a parameter that took no part in a loss, which an optimizer would skip."""


class _Updates:
    """Optimizer steps with the task's optimizer."""

    def __init__(self, task: Task, named: Mapping[str, nn.Parameter]) -> None:
        self.trained = [parameter for parameter in named.values() if parameter.requires_grad]
        self.trimming = GradientTransforms(task, named.items())
        self.fresh = _Fresh(task, list(named.values()))

    def begin(self, job: ClientJob) -> Callable[[], None]:
        """Return the function to call after each backward pass of the job."""
        optimizer = self.fresh.optimizer(job.lr_factor)
        terms = _terms(job)

        def trimmed() -> None:
            self.trimming.at(job.round)
            # Looked up at each call, with the optimizer in this closure: a scheduler replaces
            # `step` by a function that has only a weak reference to the optimizer.
            optimizer.step()

        if terms is None:
            return trimmed
        views = [self._views(part) for part in terms]

        @torch.no_grad()
        def step() -> None:
            for at, parameter in enumerate(self.trained):
                # A parameter that a forward pass has frozen since stays unchanged.
                if parameter.requires_grad:
                    # A parameter that took no part in the loss gets the proximal term and the
                    # correction anyway.
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    elif parameter.grad.is_sparse:
                        parameter.grad = parameter.grad.to_dense()
                    _add(
                        parameter.grad,
                        parameter,
                        job.mu,
                        *(None if view is None else view[at] for view in views),
                    )
            trimmed()

        return step

    def _views(self, values: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return the flat tensors `values` as pieces, in the order of the trained parameters."""
        if values is None:
            return None
        pieces = {
            dtype: iter(views_of(value, group))
            for value, (dtype, group) in zip(values, by_dtype(self.trained).items(), strict=True)
        }
        return [next(pieces[parameter.dtype]) for parameter in self.trained]


class _FlatUpdates(_Updates):
    """Optimizer steps with all parameters as a single flat parameter."""

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter], whole: nn.Parameter) -> None:
        super().__init__(task, {"": whole})
        # `whole` is a view of the model's flat weights, so a step on it moves the model.
        self.pieces = parameters
        self.whole = whole

    def begin(self, job: ClientJob) -> Callable[[], None]:
        step = super().begin(job)
        # The same buffer for all steps of the job.
        gradient = torch.empty_like(self.whole)

        def collect_and_step() -> None:
            gradients = [piece.grad for piece in self.pieces]
            if any(each is None or each.layout != torch.strided for each in gradients):
                raise _NoGradientError
            torch.cat([each.reshape(-1) for each in gradients if each is not None], out=gradient)
            self.whole.grad = gradient
            step()

        return collect_and_step


def _flat_updates(
    task: Task, parameters: Sequence[nn.Parameter], flat: FlatParameters
) -> _Updates | None:
    """Return flat updates; None if their bits differ or they gain nothing."""
    if len(flat.buffers) != 1 or flat.buffers[0].numel() > SMALL_MODEL:
        return None
    # The norm of one vector is rounded otherwise than that of the norms of many.
    if task.clip_norm is not None:
        return None
    # A single parameter is frozen as a whole or not at all.
    if task.unfreeze is not None or not all(one.requires_grad for one in parameters):
        return None
    # Made both ways, because the task may treat parameters differently by number or shape: only
    # equal optimizers with equal settings give equal bits.
    given = optimizer_of(task, parameters)
    whole = nn.Parameter(flat.buffers[0])
    try:
        alone = optimizer_of(task, [whole])
    except Exception:
        return None  # a function for these parameters, and not for one
    if (
        is_plain(given)
        or has_step_hooks(given)
        or type(given) not in _BY_ELEMENT
        or type(alone) is not type(given)
        or len(given.param_groups) != 1
    ):
        return None
    same = settings(given.param_groups[0]) == settings(alone.param_groups[0])
    covers = [id(each) for each in given.param_groups[0]["params"]] == [
        id(each) for each in parameters
    ]
    if not same or not covers or given.param_groups[0].get("fused"):
        return None
    return _FlatUpdates(task, parameters, whole)


class _Fresh:
    """Optimizers with new state for each job.

    The optimizer is reused if its state can be reset, and made again otherwise.
    """

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter]) -> None:
        self.make: Callable[[], torch.optim.Optimizer] = lambda: optimizer_of(task, parameters)
        self.reused: torch.optim.Optimizer | None = None
        self.before: list[dict[str, Any]] = []
        made = self.make()
        self.plain = PlainSGD(made) if is_plain(made) else None
        # A hook may store references to the optimizer, and a tensor among the settings may change.
        if type(made) in _BY_ELEMENT and not has_step_hooks(made):
            groups = [settings(group) for group in made.param_groups]
            values = chain.from_iterable(group.values() for group in groups)
            if not any(isinstance(value, Tensor) for value in values):
                self.reused = made
                self.before = groups

    def optimizer(self, lr_factor: float) -> torch.optim.Optimizer | PlainSGD:
        if self.plain is not None:
            self.plain.lr_factor = lr_factor
            return self.plain
        made = self.make() if self.reused is None else self.reused
        if self.reused is not None:
            # Clearing the state and resetting the settings is equivalent to a new optimizer, and
            # much cheaper for a small model.
            self.reused.state.clear()
            for group, before in zip(self.reused.param_groups, self.before, strict=True):
                group.update(before)
        scale(made, lr_factor)
        return made


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _terms(job: ClientJob) -> tuple[Sequence[Tensor] | None, Sequence[Tensor] | None] | None:
    """Return (anchor, correction), each None if it adds nothing; None if both are."""
    anchor = (job.anchor if job.anchor is not None else job.weights) if job.mu else None
    return None if anchor is None and job.correction is None else (anchor, job.correction)


def _add(
    gradient: Tensor, weights: Tensor, mu: float, anchor: Tensor | None, correction: Tensor | None
) -> None:
    """Add mu (weights - anchor) + correction to the gradient, in place."""
    if anchor is not None:
        gradient.add_(weights - anchor, alpha=mu)
    if correction is not None:
        gradient.add_(correction)
