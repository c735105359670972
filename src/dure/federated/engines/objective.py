"""Custom objectives of algorithms (`Algorithm.objective`), computed by an engine.

    each step:  g <- gradient with respect to w of objective(w; batch, references)

References are models of the task's class with other weights, such as the global model and the
client's personalised model of the round before. They are in evaluation mode, and have no gradients.

Cost: the objective's; memory of a model for each reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dure.contracts.fresh_model import unused_copy
from dure.contracts.task import Task
from dure.federated.engines.job import ClientJob, Reference
from dure.tasks.loss_shares import ComputedLoss, CountedLoss
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import frozen_of, load_frozen


class LocalBatch(NamedTuple):
    """Inputs of an objective: a client's step.

    model: the client's model, which is trained. inputs, targets: of the batch, as the task's
    examples give them. loss: from outputs to the mean of the task's loss over its counted weight in
    the batch. references: the job's, in its order. job: the client's job.
    """

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[[Any], Tensor]
    references: Sequence[nn.Module]
    job: ClientJob


Objective = Callable[[LocalBatch], Tensor]


class CustomObjective:
    """Custom objective of an algorithm, for an engine with a single model.

    Args:
        objective: the algorithm's objective.
        losses: the task's loss, with its counted weight.
        task: the task of the run.
        model: the engine's, not used yet.
        seed: of the run.
    """

    def __init__(
        self, objective: Objective, losses: CountedLoss, task: Task, model: nn.Module, seed: int
    ) -> None:
        self.objective = objective
        self.losses = losses
        self.model = model
        self._task = task
        self._seed = seed
        # Copied now, because a used model may not support copying.
        self._fresh = unused_copy(model, task, seed)
        self._copies: list[_Copy] = []
        self._job: ClientJob | None = None
        self._references: list[nn.Module] = []

    def begin(self, job: ClientJob) -> None:
        """Prepare the steps of this job."""
        self._job = job
        while len(self._copies) < len(job.references):
            made = unused_copy(self._fresh, self._task, self._seed)
            load_frozen(made, frozen_of(self.model))
            self._copies.append(_Copy(made))
        self._references = [
            copy.of(reference)
            for copy, reference in zip(self._copies, job.references, strict=False)
        ]

    def of(self, inputs: Any, targets: Any, examples: int) -> ComputedLoss:
        """Return the objective on a batch of `examples` examples, and its counted weight.

        Raises TypeError for an objective that is not a tensor with a single number.
        """
        assert self._job is not None
        # Unless the objective calls the task's loss, each example counts 1.
        counted = [float(examples)]

        def loss(outputs: Any) -> Tensor:
            computed = self.losses.mean(outputs, targets, examples)
            counted[0] = computed.counted
            return computed.loss

        batch = LocalBatch(self.model, inputs, targets, loss, self._references, self._job)
        value = self.objective(batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"the objective is {what}, but has to be a tensor of one number")
        return ComputedLoss(value.reshape(()), counted[0])


class _Copy:
    """A model that takes the weights of one reference after another."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Before all parameters are frozen below: these are the trained parameters.
        self.flat = FlatParameters(model)
        self.buffers = BufferNames(model)

    def of(self, reference: Reference) -> nn.Module:
        """Return the model with the weights and buffers of this reference."""
        self.flat.load(reference.weights)
        self.buffers.load(self.model, reference.buffers)
        return self.model.requires_grad_(False).eval()
