"""One client after another, by autograd: what every other engine is compared with.

One model serves all clients: its parameters lie in one flat buffer, so that taking over the weights
and forming the update are one operation each. The optimizer's state is a fresh one in every job, as
the paper's clients keep nothing between rounds: momentum starts from zero.

Where the optimizer computes each element by itself (SGD, Adam and others of torch's), a small
model's gradients are copied into one flat buffer, and the optimizer has one parameter instead of
many: the same bits from a few calls. Large models are not copied: there the calls cost little next
to the memory that a copy moves. Nor are those of plain SGD, which is one call anyway
(`optimizers`), nor those of an optimizer with hooks, which see the parameters as they are.

A task's `clip_norm` is of each local step's gradient, with what the algorithm adds to it, and its
`unfreeze` counts rounds.

With `noised` a client's steps are those of DP-SGD (`noised`); with an objective of the algorithm's
own they minimise that (`objective`).

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
from dure.federated.engines.job import Engine, Job, Trained, loss_failure, not_finite
from dure.federated.engines.noised import Noised, NoisedSteps
from dure.federated.engines.objective import Objective, OwnObjective
from dure.federated.engines.optimizers import PlainSGD, is_plain, optimizer_of
from dure.federated.engines.plan import batches
from dure.machine.devices import home_of, to_device
from dure.randomness.seeds import seed_generators
from dure.tasks.loss_shares import Computed, CountedLoss
from dure.tasks.trimming import Trimming, computing
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters, by_dtype, trained_of, views_of
from dure.tensors.frozen import Frozen
from dure.tensors.optimizer_state import listened

SMALL_MODEL = 1 << 18
"""Elements up to which gradients are copied into one buffer."""

_BY_ELEMENT: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)
"""Optimizers that treat each element by itself, and make their state in the first step."""


class LoopEngine(Engine):
    """Trains for one client after another.

    model: a fresh one, which becomes the engine's own. examples: of all clients, in the model's
    dtype. batch_size: of a client's step; None is all of its data. noised: examples are protected.
    objective: what clients minimise; None is the task's loss.
    """

    name = "loop"

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        examples: Examples,
        batch_size: int | None,
        seed: int,
        noised: Noised | None = None,
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
            None if objective is None else OwnObjective(objective, self.losses, task, model, seed)
        )
        self.flat = FlatParameters(model)
        self.frozen = Frozen(model)
        self.buffers = Buffers(model)
        self.parameters = list(model.parameters())
        # As they are now: a forward pass may freeze some later.
        self.groups = list(by_dtype(trained_of(model)).values())
        self.device = home_of(model)
        self.updates: _Updates = _flat_updates(task, self.parameters, self.flat) or _Updates(
            task, dict(model.named_parameters())
        )

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """The results in the jobs' order, each computed when it is asked for.

        A client whose loss or weights are not finite has a failure as its result. Raises
        WorkerFailedError, which names the client, when the user's own code raises.
        """
        for job in jobs:
            try:
                trained = self._train(job)
            except _NoGradientError:
                # A parameter without a gradient is passed over by an optimizer, which one flat
                # parameter cannot be. From now on they stay apart; the job begins again, with the
                # same draws.
                self.updates = _Updates(self.task, dict(self.model.named_parameters()))
                trained = self._train(job)
            yield trained

    def _train(self, job: Job) -> Trained:
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
            # A loss that was not finite before the error is the likelier cause: it is told instead.
            failure = loss_failure(_values(losses))
            if failure is None:
                raise failed(job, error) from error
            return not_finite(failure)
        check_frozen(self.frozen, job)
        values = _values(losses)
        failure = loss_failure(values)
        if failure is not None:
            return not_finite(failure)
        # A loss shows what the step before it did; after the last step none would.
        if not all(bool(weights.isfinite().all()) for weights in self.flat.buffers):
            return not_finite("its weights became not finite")
        pairs = zip(self.flat.buffers, job.weights, strict=True)
        delta = [now - before for now, before in pairs] if gradient is None else gradient
        buffers = self.buffers.of(self.model) if gradient is None else job.buffers
        counted = sum(counts)
        total = sum(value * count for value, count in zip(values, counts, strict=True))
        return Trained(
            delta=delta,
            buffers=[buffer.clone() for buffer in buffers],
            samples=samples,
            loss=total / counted if counted else 0.0,
            counted=counted,
        )

    def _load(self, job: Job) -> None:
        self.flat.load(job.weights)
        self.buffers.load(self.model, job.buffers)

    def _steps(self, job: Job, losses: list[Tensor], counts: list[float]) -> int:
        """The steps of the job; how many examples they had.

        losses, counts: get the loss of each, and what that counted.
        """
        self.model.train()
        step = self.updates.begin(job)
        samples = 0
        for batch in self._batches(job):
            loss, counted = self._loss(batch)
            # Not as a number yet: a GPU would be waited for in every step.
            losses.append(loss.detach())
            counts.append(counted)
            loss.backward()  # type: ignore[no-untyped-call]
            step()
            samples += len(batch)
        return samples

    def _batches(self, job: Job) -> Sequence[Tensor]:
        """The examples of each step, by index; all is ready for the first one."""
        order, sizes = batches(job, self.batch_size, self.seed, sampling=self.examples.sampling)
        # First, for a model that is made may draw.
        if self.objective is not None:
            self.objective.begin(job)
        seed_generators(self.seed, "client", job.turn, job.client, everything=self.examples.draws)
        parts: Sequence[Tensor] = torch.split(order, list(sizes))
        return parts

    def _loss(self, batch: Tensor) -> Computed:
        """The loss of a step, and what it has counted. batch: which examples it has."""
        if self.look is not None:
            self.look()
        inputs, targets = self.examples.batch(batch)
        if self.device.type != "cpu":
            inputs, targets = to_device((inputs, targets), self.device)
        # None and not 0: autograd then writes gradients without adding, and one that is missing
        # shows.
        for parameter in self.parameters:
            parameter.grad = None
        with computing(self.task, self.device):
            if self.objective is not None:
                return self.objective.of(inputs, targets, len(batch))
            return self.losses.mean(self.model(inputs), targets, len(batch))

    def _measured(
        self, job: Job, losses: list[Tensor], counts: list[float]
    ) -> tuple[int, list[Tensor]]:
        """`_steps` of a job that measures: how many examples it had, and the gradient or zeros."""
        if self.noised is not None:
            raise ValueError("dp-sgd: a client measures its loss without noise, which it may not")
        gradients = job.measures == "gradient"
        self.model.train(gradients)
        total = [torch.zeros_like(weights) for weights in self.flat.buffers]
        samples = 0
        with torch.set_grad_enabled(gradients):
            for batch in self._batches(job):
                loss, counted = self._loss(batch)
                losses.append(loss.detach())
                counts.append(counted)
                samples += len(batch)
                if gradients and counted:
                    loss.backward()  # type: ignore[no-untyped-call]
                    for sum_, own in zip(total, self._gradient(), strict=True):
                        sum_.add_(own, alpha=counted)
        return samples, [sum_.div_(sum(counts) or 1.0) for sum_ in total]

    def _gradient(self) -> list[Tensor]:
        """The gradients as they are now, flat as weights are."""
        return [
            torch.cat([_dense(parameter).reshape(-1) for parameter in group])
            for group in self.groups
        ]

    def _noised_steps(
        self, noised: NoisedSteps, job: Job, losses: list[Tensor], counts: list[float]
    ) -> int:
        """`_steps` of DP-SGD: how many examples they had in the mean, for it tells no more."""
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
    """Its gradient; zeros where it took no part in the loss."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def check_frozen(frozen: Frozen, job: Job) -> None:
    """Raises WorkerFailedError where training has changed what is not trained."""
    changed = frozen.changed()
    if changed is not None:
        raise WorkerFailedError(job.who, f"round {job.round + 1}", changed)


def failed(job: Job, error: BaseException) -> WorkerFailedError:
    """What the user reads of an error of his own code."""
    return WorkerFailedError(job.who, f"round {job.round + 1}", described(error))


def _values(losses: Sequence[Tensor]) -> list[float]:
    """The losses as numbers, read all at once, for a GPU is waited for whenever one is read."""
    if not losses:
        return []
    values: list[float] = torch.stack([loss.reshape(()) for loss in losses]).tolist()
    return values


class _NoGradientError(Exception):
    """A parameter took no part in a loss, so that an optimizer would pass it over."""


class _Updates:
    """The optimizer as the task makes it."""

    def __init__(self, task: Task, named: Mapping[str, nn.Parameter]) -> None:
        self.trained = [parameter for parameter in named.values() if parameter.requires_grad]
        self.trimming = Trimming(task, named.items())
        self.fresh = _Fresh(task, list(named.values()))

    def begin(self, job: Job) -> Callable[[], None]:
        """What is to be called after each backward pass of the job."""
        optimizer = self.fresh.optimizer(job.lr_factor)
        terms = _terms(job)

        def trimmed() -> None:
            self.trimming.at(job.round)
            # Not bound before: a scheduler inside it makes `step` hold it weakly.
            optimizer.step()

        if terms is None:
            return trimmed
        views = [self._views(part) for part in terms]

        @torch.no_grad()
        def step() -> None:
            for at, parameter in enumerate(self.trained):
                # One that a forward pass has frozen since stays as it is.
                if parameter.requires_grad:
                    # A parameter that took no part in the loss is pulled and corrected all the
                    # same.
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
        """The flat tensors `values` as pieces in the order of the trained parameters."""
        if values is None:
            return None
        pieces = {
            dtype: iter(views_of(value, group))
            for value, (dtype, group) in zip(values, by_dtype(self.trained).items(), strict=True)
        }
        return [next(pieces[parameter.dtype]) for parameter in self.trained]


class _FlatUpdates(_Updates):
    """All parameters as one, whose gradient is a flat buffer."""

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter], whole: nn.Parameter) -> None:
        super().__init__(task, {"": whole})
        # `whole` lies in the memory of the model's flat weights, so a step on it moves the model.
        self.pieces = parameters
        self.whole = whole

    def begin(self, job: Job) -> Callable[[], None]:
        step = super().begin(job)
        # One buffer for all steps of the job.
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
    """Updates with all parameters as one; None where the bits differ or nothing is gained."""
    if len(flat.buffers) != 1 or flat.buffers[0].numel() > SMALL_MODEL:
        return None
    # Of one parameter, all or nothing is frozen.
    if task.unfreeze is not None or not all(one.requires_grad for one in parameters):
        return None
    # Made both ways, for the task may treat parameters apart, by their number or shape: only where
    # both give the same optimizer with the same settings are the bits the same.
    given = optimizer_of(task, parameters)
    whole = nn.Parameter(flat.buffers[0])
    alone = optimizer_of(task, [whole])
    if (
        is_plain(given)
        or listened(given)
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
    """A fresh optimizer for each job.

    It is the same object where its state can be taken away, and a new one elsewhere.
    """

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter]) -> None:
        self.make: Callable[[], torch.optim.Optimizer] = lambda: optimizer_of(task, parameters)
        self.reused: torch.optim.Optimizer | None = None
        self.before: list[dict[str, Any]] = []
        made = self.make()
        self.plain = PlainSGD(made) if is_plain(made) else None
        # A hook may keep something of the optimizer, and a tensor among the settings may change.
        if type(made) in _BY_ELEMENT and not listened(made):
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
            # To forget the state and the settings that a scheduler changed is as good as new, and
            # much cheaper for a small model.
            self.reused.state.clear()
            for group, before in zip(self.reused.param_groups, self.before, strict=True):
                group.update(before)
        scale(made, lr_factor)
        return made


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _terms(job: Job) -> tuple[Sequence[Tensor] | None, Sequence[Tensor] | None] | None:
    """(anchor, correction), each None where it adds nothing; None if both are."""
    anchor = (job.anchor if job.anchor is not None else job.weights) if job.mu else None
    return None if anchor is None and job.correction is None else (anchor, job.correction)


def _add(
    gradient: Tensor, weights: Tensor, mu: float, anchor: Tensor | None, correction: Tensor | None
) -> None:
    """Adds mu (weights - anchor) + correction to the gradient, in place."""
    if anchor is not None:
        gradient.add_(weights - anchor, alpha=mu)
    if correction is not None:
        gradient.add_(correction)
