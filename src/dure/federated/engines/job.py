"""Jobs and results: values between the federation and the engine that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from dure.protocol.messages import Failure


class Reference(NamedTuple):
    """A model that an objective reads, without training.

    weights, buffers: as in a job.
    """

    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]


Measures = Literal["loss", "gradient"]
"""Quantity that a job measures at its weights, instead of training."""


# gc=False: a round has many jobs, and none is part of a cycle.
class ClientJob(msgspec.Struct, frozen=True, gc=False):
    """Local training of a client.

        for t = first_step .. first_step + steps - 1:
            g <- gradient of the client's loss at w on batch t
            g <- g + mu (w - anchor) + correction                  if given
            w <- optimizer step with g, from w = weights, with its learning rates times lr_factor

    Args:
        client: number of the client.
        round: of the weights.
        indices: the client's examples, in the task's training data.
        weights: of the trained parameters, one flat tensor per dtype (`dure.tensors.flat`), shared
            and never changed.
        buffers: the model's buffers, in its own order.
        first_step: continues over the client's rounds, so that batches continue
            (`Batches(len(indices), batch_size, seed, client, joins).at(step)`).
        steps: number of steps.
        mu: coefficient of the proximal term.
        anchor: centre of the proximal term, shaped as weights; None is `weights`.
        correction: added to each gradient, shaped as weights; None adds nothing.
        turn: seeds the client's random draws, which are derived from (client, turn).
        lr_factor: factor of the optimizer's learning rates.
        joins: whether a single example at the end of an epoch joins the batch before it.
        name: the client's name for messages; None for its number.
        references: other models that a custom objective reads (`Algorithm.objective`).
        measures: measure instead of training. "loss": only the mean loss over the examples of these
            steps at the weights, with the model in evaluation mode. "gradient": the mean loss in
            training mode, and its gradient. mu, anchor, correction and lr_factor then have no
            effect.
    """

    client: int
    round: int
    indices: Tensor
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]
    first_step: int
    steps: int
    mu: float = 0.0
    anchor: Sequence[Tensor] | None = None
    correction: Sequence[Tensor] | None = None
    turn: int = 0
    lr_factor: float = 1.0
    joins: bool = False
    name: str | None = None
    references: Sequence[Reference] = ()
    measures: Measures | None = None

    @property
    def who(self) -> str:
        """Name of the client, for messages."""
        return f"client {self.client}" if self.name is None else self.name


class JobResult(msgspec.Struct, frozen=True, gc=False):
    """Result of a job.

    delta: weights after training minus `job.weights`; of a measuring job, the gradient, or zeros
    with the loss alone. samples: number of processed examples. loss: mean over the weight that the
    loss counted in them, `counted`; None: each example counts 1. failure: the reason, if a number
    of the result is not finite; all other fields are then empty, and the other clients continue.
    steps: of the optimizer, if not all of the job were made.
    """

    delta: Sequence[Tensor]
    buffers: Sequence[Tensor]
    samples: int
    loss: float
    failure: Failure | None = None
    counted: float | None = None
    steps: int | None = None


def not_finite(failure: Failure) -> JobResult:
    """Return the result of a job whose numbers are not all finite."""
    return JobResult(delta=[], buffers=[], samples=0, loss=0.0, failure=failure)


def loss_failure(losses: Iterable[float]) -> Failure | None:
    """Return the failure of a job's losses; None if all are finite."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            # At the shared start weights, the client's data are the cause.
            return "its loss became not finite" if step else "its first loss is not finite"
    return None


class ClientEngine:
    """Base class of engines; subclasses define at least a name and `train`."""

    name: str
    why: str = ""
    """Reason for the choice of this engine, in a line; empty if requested by name."""
    look: Callable[[], None] | None = None
    """Called before each step, of a client that trains alone or of many at once.

    A DureError of the callback ends the training. In a process of its own the engine reports
    progress this way: a process without progress for the deadline counts as hung.
    """
    batch_size: int | None = None
    """Batch size of a client's step; None is all of its data."""
    cohort: int = 1
    """Preferred number of jobs at once; more jobs are not faster per job."""
    chunk: int = 0
    """Number of jobs per process and message; 0 without processes."""
    threads: int | None = None
    """Thread limit of operators in long steps of many clients; None leaves it unchanged."""

    def train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Do the jobs and yield the results in their order, a few at a time.

        At most a cohort is in memory.
        """
        raise NotImplementedError

    def at_once(self, job: ClientJob) -> int:
        """Return the preferred number of jobs like this one at once."""
        return 1

    def alone(self, flops: Callable[[], float], threads: int | None) -> None:
        """Note that the engine has the cores of this process to itself.

        threads: thread limit of an operator; None is the present number. flops: returns the
        floating-point operations of an example's step.
        """

    def close(self) -> None:
        """End the engine's processes, if there are any."""

    def tune(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Train as `train`, towards a client's personalised model and not the next global model."""
        return self.train(jobs)
