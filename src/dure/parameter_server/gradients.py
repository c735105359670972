"""What a worker computes: the gradient of its part of a batch, at the weights it was given.

The gradient of a part is that of its mean loss, and has a weight in its batch:

    staleness 0          what the loss has counted in the part (`dure.tasks.loss_shares`)
    others               its share of the batch's examples

so that with staleness 0 the parts of a batch add up to the gradient of data parallel. The gradient
leaves as flat vectors, one a dtype, in the order of the keys. Draws, such as dropout's, are a
function of the batch and the part, as those of the ranks of data parallel are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dure.contracts.strategy import examples_for
from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.errors import LossNotFiniteError
from dure.parameter_server.scheduler import Work
from dure.randomness.seeds import seed_generators
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.flat import FlatParameters, by_dtype, trained_of


@dataclass
class Computed:
    """The gradient of a part, by vector, its weight, and what its loss was.

    loss: the mean over what it has counted. seconds: of computing.
    """

    gradients: list[Tensor]
    weight: float
    loss: float
    counted: float
    examples: int
    seconds: float


class Gradients:
    """The model of a worker, or of all that are simulated in one process.

    bulk: whether the parts of a batch become one step (staleness 0). skips: whether a step leaves
    alone what has a gradient of zero; where it does not, every parameter has to have one. groups:
    how many, each of which goes over the data in an order of its own.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        seed: int,
        batch_size: int | None,
        bulk: bool,
        skips: bool,
        groups: int = 1,
        clip_norm: float | None = None,
    ) -> None:
        self.model = model
        self.seed = seed
        self.bulk = bulk
        self.skips = skips
        self.clip_norm = clip_norm
        self.flat = FlatParameters(model)
        self.examples, self.test = examples_for(model, task)
        self.losses = CountedLoss(task.loss, self.examples)
        self.batches = [Batches(len(self.examples), batch_size, seed, n) for n in range(groups)]
        self._names = {id(one): name for name, one in model.named_parameters()}
        self._vectors = list(by_dtype(trained_of(model)).values())

    @property
    def steps_per_epoch(self) -> int:
        """Batches in a pass over the data."""
        return self.batches[0].steps_per_epoch

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Sets the weights, by vector."""
        self.flat.load(vectors)

    def of(self, work: Work, group: int, who: str, out: Sequence[Tensor] | None = None) -> Computed:
        """The gradient of a part at the weights as they are.

        who: whose it is, for errors. out: where it is written, by vector; by default new memory.
        Raises LossNotFiniteError for a loss that is not, and ValueError for a parameter without a
        gradient that the optimizer would move all the same.
        """
        batch = self.batches[group].at(work.batch)
        part = batch.tensor_split(work.parts)[work.part]
        place = (work.batch, work.part) if group == 0 else (work.batch, work.part, group)
        found = self.mean(part, place, who, out)
        # Data parallel's weight, or a share of the batch.
        found.weight = found.counted if self.bulk else len(part) / len(batch)
        return found

    def mean(
        self,
        part: Tensor,
        place: tuple[int, ...],
        who: str,
        out: Sequence[Tensor] | None = None,
    ) -> Computed:
        """The gradient of the mean loss of these examples, which has weight 1.

        place: where they are in the run, its step first: what is drawn is a function of it. who,
        out, and what is raised: as in `of`.
        """
        seed_generators(self.seed, "step", *place, everything=self.examples.draws)
        started = time.perf_counter()
        if out is None:
            out = [torch.empty_like(vector) for vector in self.flat.buffers]
        if not len(part):
            empty = [vector.zero_() for vector in out]
            return Computed(empty, 0.0, 0.0, 0.0, 0, time.perf_counter() - started)
        for parameter in self.model.parameters():
            parameter.grad = None
        inputs, targets = self.examples.batch(part)
        found = self.losses.mean(self.model(inputs), targets, len(part))
        loss = float(found.loss.item())
        if not math.isfinite(loss):
            raise LossNotFiniteError(loss, who, f"step {place[0] + 1}")
        found.loss.backward()  # type: ignore[no-untyped-call]
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        for vector, room in zip(self._vectors, out, strict=True):
            self._write(vector, found.counted, room)
        return Computed(
            gradients=list(out),
            weight=1.0,
            loss=loss,
            counted=found.counted,
            examples=len(part),
            seconds=time.perf_counter() - started,
        )

    def _write(self, parameters: Sequence[nn.Parameter], counted: float, room: Tensor) -> None:
        """Writes the gradients of the parameters of a vector, one after another."""
        parts = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                if not self.skips and counted:
                    raise ValueError(no_gradient(self._names[id(parameter)]))
                gradient = torch.zeros_like(parameter)
            parts.append(gradient.reshape(-1))
        torch.cat(parts, out=room)


def no_gradient(name: str) -> str:
    """What is wrong where a parameter of this name has no gradient."""
    return (
        f"{name} has no gradient, and the optimizer at the servers would move it all the same: "
        f"freeze it, or take SGD without momentum and weight decay"
    )
