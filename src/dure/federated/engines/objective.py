"""What clients minimise where an algorithm says it (`Algorithm.objective`).

    each step:  g <- gradient with respect to w of objective(w; batch, references)

References are models of the task's class with other weights, such as the global model and the
client's own of the round before. They are in evaluation, and have no gradients.

Cost: what the objective computes; the memory of a model for each reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dure.contracts.strategy import another
from dure.contracts.task import Task
from dure.federated.engines.job import Job, Reference
from dure.tasks.loss_shares import Computed, CountedLoss
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import frozen_of, load_frozen


class LocalBatch(NamedTuple):
    """A client's step, for an objective.

    model: the client's, which is trained. inputs, targets: of the batch, as the task's examples
    give them. loss: of outputs, the mean of the task's loss over what it counts in the batch.
    references: the job's, in its order. job: what the client is to do.
    """

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[[Any], Tensor]
    references: Sequence[nn.Module]
    job: Job


Objective = Callable[[LocalBatch], Tensor]


class OwnObjective:
    """Computes an objective of an algorithm's own for an engine of one model.

    model: the engine's, which was not used yet. losses: of the task.
    """

    def __init__(
        self, objective: Objective, losses: CountedLoss, task: Task, model: nn.Module, seed: int
    ) -> None:
        self.objective = objective
        self.losses = losses
        self.model = model
        self._task = task
        self._seed = seed
        # Copied now: one that was used may have no copy.
        self._fresh = another(model, task, seed)
        self._copies: list[_Copy] = []
        self._job: Job | None = None
        self._references: list[nn.Module] = []

    def begin(self, job: Job) -> None:
        """The steps that follow are of this job."""
        self._job = job
        while len(self._copies) < len(job.references):
            made = another(self._fresh, self._task, self._seed)
            load_frozen(made, frozen_of(self.model))
            self._copies.append(_Copy(made))
        self._references = [
            copy.of(reference)
            for copy, reference in zip(self._copies, job.references, strict=False)
        ]

    def of(self, inputs: Any, targets: Any, examples: int) -> Computed:
        """The objective on a batch of so many examples, and what it has counted there.

        Raises TypeError for an objective that is no tensor of one number.
        """
        assert self._job is not None
        # Where the task's loss is not asked for, each example counts one.
        counted = [float(examples)]

        def loss(outputs: Any) -> Tensor:
            computed = self.losses.mean(outputs, targets, examples)
            counted[0] = computed.counted
            return computed.loss

        batch = LocalBatch(self.model, inputs, targets, loss, self._references, self._job)
        value = self.objective(batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"the objective is {what}, and a tensor of one number is wanted")
        return Computed(value.reshape(()), counted[0])


class _Copy:
    """A model that has the weights of one reference, and then of another."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Before nothing is trained any more: these are the trained ones.
        self.flat = FlatParameters(model)
        self.buffers = Buffers(model)

    def of(self, reference: Reference) -> nn.Module:
        """The model, which is now this reference."""
        self.flat.load(reference.weights)
        self.buffers.load(self.model, reference.buffers)
        return self.model.requires_grad_(False).eval()
