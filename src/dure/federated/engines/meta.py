"""Engine of Per-FedAvg: gradients at an adapted model, one client after another.

The rule is in `dure.federated.algorithms.per_fed_avg`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.contracts.lr_schedule import scale
from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.errors import DureError
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult, loss_failure, not_finite
from dure.federated.engines.loop import check_frozen, client_error
from dure.federated.engines.optimizers import optimizer_of
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.tasks.gradient_transforms import GradientTransforms, forward_context
from dure.tasks.loss_scaling import RepeatedPasses
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters, by_dtype, trainable_parameters, views_of
from dure.tensors.frozen import FrozenSnapshot

NUDGE = 1e-3
"""δ times the norm of the direction.

The product is the distance of the gradients whose difference estimates the Hessian.
"""


class BatchLoss(NamedTuple):
    """Mean loss of a batch, and its counted weight."""

    loss: float
    counted: float


Steps = Iterator[tuple[BatchLoss, int]]
"""Result of each step, and its number of examples."""


class MetaEngine(ClientEngine):
    """Engine that trains by gradients at an adapted model, one client after another.

    Args:
        task: the task of the run.
        model: a new model, which becomes the engine's.
        examples: of all clients, in the model's dtype.
        batch_size: of a client's step; None is all of its data.
        seed: of the run.
        alpha: size of the inner step.
        hessian_free: whether the second derivative is estimated, or left out.
    """

    name = "meta"
    why = "the only one that computes gradients at an adapted model"

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        examples: Examples,
        batch_size: int | None,
        seed: int,
        alpha: float,
        hessian_free: bool,
    ) -> None:
        self.task = task
        self.model = model
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self.alpha = alpha
        self.hessian_free = hessian_free
        self.losses = CountedLoss(task.loss, examples)
        self.device = device_of_model(model)
        self.flat = FlatParameters(model)
        self.frozen = FrozenSnapshot(model)
        self.buffers = BufferNames(model)
        self.groups = list(by_dtype(trainable_parameters(model)).values())
        self.trained = list(chain.from_iterable(self.groups))
        self.reached: set[nn.Parameter] = set()
        """Parameters that the losses of the current step reach."""
        self.trimming = GradientTransforms(task, model.named_parameters())
        self.passes = RepeatedPasses(task, model, self.device)

    def train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Yield the results in the jobs' order, each computed on demand.

        A client whose loss or weights are not finite has a failure as its result. Raises
        WorkerFailedError, with the client's name, if user code raises.
        """
        return (self._done(job, self._meta_steps) for job in jobs)

    def tune(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Train by plain steps with alpha, which give a client's personalised model."""
        return (self._done(job, self._plain_steps) for job in jobs)

    def _done(self, job: ClientJob, steps: Callable[[ClientJob, Batches], Steps]) -> JobResult:
        try:
            if job.measures is not None:
                raise ValueError(f"the engine {self.name} does not measure a {job.measures}")
            return self._trained(job, steps)
        except (DureError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise client_error(job, error) from error

    def _trained(self, job: ClientJob, steps: Callable[[ClientJob, Batches], Steps]) -> JobResult:
        self.flat.load(job.weights)
        self.buffers.load(self.model, job.buffers)
        seed_generators(self.seed, "client", job.turn, job.client, everything=self.examples.draws)
        self.model.train()
        # A new scale for each job: the result does not depend on the jobs before.
        self.passes = RepeatedPasses(self.task, self.model, self.device)
        ran: list[tuple[BatchLoss, int]] = []
        order = self.examples.sampling.order(0, job.indices)
        batches = Batches(
            len(job.indices), self.batch_size, self.seed, job.client, job.joins, order
        )
        for found, size in steps(job, batches):
            if self.look is not None:
                self.look()
            ran.append((found, size))
            failure = loss_failure(each.loss for each, _ in ran)
            if failure is not None:
                return not_finite(failure)
        check_frozen(self.frozen, job)
        if not all(bool(weights.isfinite().all()) for weights in self.flat.buffers):
            return not_finite("its weights became not finite")
        delta = [now - before for now, before in zip(self.flat.buffers, job.weights, strict=True)]
        counted = sum(found.counted for found, _ in ran)
        return JobResult(
            delta=delta,
            buffers=[buffer.clone() for buffer in self.buffers.of(self.model)],
            samples=sum(size for _, size in ran),
            loss=sum(found.loss * found.counted for found, _ in ran) / counted if counted else 0.0,
            counted=counted,
        )

    def _meta_steps(self, job: ClientJob, batches: Batches) -> Steps:
        optimizer = optimizer_of(self.task, list(self.model.parameters()))
        scale(optimizer, job.lr_factor)
        # Every local step takes `each` batches, so a pass has fewer steps.
        each = 3 if self.hessian_free else 2
        for step in range(job.first_step, job.first_step + job.steps):
            own = [job.indices[batches.at(each * step + nth)] for nth in range(each)]
            self.reached.clear()
            found, gradient = self._meta_gradient(own)
            for group, flat in zip(self.groups, gradient, strict=True):
                for parameter, piece in zip(group, views_of(flat, group), strict=True):
                    # For the task's own optimizer, which reads gradients there, and skips a
                    # parameter without a gradient.
                    parameter.grad = piece if parameter in self.reached else None
            self.trimming.at(job.round)
            optimizer.step()
            yield found, len(own[1])

    def _plain_steps(self, job: ClientJob, batches: Batches) -> Steps:
        for step in range(job.first_step, job.first_step + job.steps):
            batch = job.indices[batches.at(step)]
            found, gradient = self._gradient(batch)
            self._move(gradient, -self.alpha)
            yield found, len(batch)

    def _meta_gradient(self, batches: Sequence[Tensor]) -> tuple[BatchLoss, list[Tensor]]:
        """Return (loss of the adapted model, gradient of that loss with respect to the model)."""
        # Weights are moved in place and restored at the end: a single model is enough.
        start = self.flat.copy()
        if self.alpha:
            self._move(self._gradient(batches[0])[1], -self.alpha)
        found, gradient = self._gradient(batches[1])
        if self.hessian_free and self.alpha:
            gradient = self._less_curvature(gradient, batches[2], start)
        self.flat.load(start)
        return found, gradient

    def _less_curvature(
        self, gradient: list[Tensor], batch: Tensor, at: list[Tensor]
    ) -> list[Tensor]:
        """Return (I - α·∇²f)·gradient at the weights `at`."""
        norm = float(
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradient]))
        )
        if norm == 0:
            return gradient
        # Both sides always have the same distance, whatever the length of the gradient.
        nudge = NUDGE / norm
        sides = []
        before = generators_state()
        for sign in (1, -1):
            restore_generators(before)  # equal dropout on both sides
            self.flat.load(at)
            self._move(gradient, sign * nudge)
            sides.append(self._gradient(batch)[1])
        scale = self.alpha / (2 * nudge)
        return [g - scale * (up - down) for g, up, down in zip(gradient, *sides, strict=True)]

    def _gradient(self, indices: Tensor) -> tuple[BatchLoss, list[Tensor]]:
        """Return (loss, gradient) of a batch at the present weights, flat."""
        return self.passes.run(lambda: self._pass(indices), lambda found: found[1])

    def _pass(self, indices: Tensor) -> tuple[BatchLoss, list[Tensor]]:
        inputs, targets = self.examples.batch(indices)
        if self.device.type != "cpu":
            inputs, targets = to_device((inputs, targets), self.device)
        with forward_context(self.task, self.device):
            loss, counted = self.losses.mean(self.model(inputs), targets, len(indices))
        # A forward pass may have frozen some parameters since.
        still = [parameter for parameter in self.trained if parameter.requires_grad]
        gradients = torch.autograd.grad(self.passes.scaled(loss), still, allow_unused=True)
        found = {
            parameter: gradient.to_dense() if gradient.is_sparse else gradient
            for parameter, gradient in zip(still, gradients, strict=True)
            if gradient is not None
        }
        self.reached.update(found)
        flat = [
            torch.cat(
                [
                    (found[one] if one in found else torch.zeros_like(one)).reshape(-1)
                    for one in group
                ]
            )
            for group in self.groups
        ]
        return BatchLoss(float(loss.detach()), counted), flat

    @torch.no_grad()
    def _move(self, direction: Sequence[Tensor], by: float) -> None:
        for weights, moved in zip(self.flat.buffers, direction, strict=True):
            weights.add_(moved, alpha=by)
