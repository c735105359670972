"""What a client is to do, and what came of it.

These are values between the federation and the engine that computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from dure.protocol.messages import Failure


class Reference(NamedTuple):
    """A model that an objective looks at, and that is not trained.

    weights, buffers: as those of a job.
    """

    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]


Measures = Literal["loss", "gradient"]
"""What a job finds out at its weights, in place of training."""


# gc=False: a round has many jobs, and none is part of a cycle.
class Job(msgspec.Struct, frozen=True, gc=False):
    """Local training of one client.

        for t = first_step .. first_step + steps - 1:
        g <- gradient of the client's loss at w on batch t
        g <- g + mu (w - anchor) + correction                  where they are given
        w <- optimizer step with g, from w = weights, with its learning rates times lr_factor

    client: its number. round: of the weights. turn: where its draws go on, which are derived from
    (client, turn). indices: its examples, in the task's training data. weights, anchor, correction:
    of the trained parameters, one flat tensor a dtype (`dure.tensors.flat`), shared and never
    changed; anchor None is `weights`. buffers: the model's buffers, in its own order. first_step:
    counts on over the client's rounds, so that batches go on where they stopped
    (`Batches(len(indices), batch_size, seed, client, joins).at(step)`). joins: whether a single
    example that is left at the end of an epoch joins the batch before it. name: the client for
    people, where it is more than its number. references: other models that an objective of the
    algorithm's own looks at (`Algorithm.objective`).

    measures: nothing is trained. "loss": only the mean of the loss over the examples of these steps
    at the weights, as a model in evaluation has it. "gradient": that of the loss in training, and
    its gradient. Then mu, anchor, correction and lr_factor are of no account.
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
        """The client, for people."""
        return f"client {self.client}" if self.name is None else self.name


class Trained(msgspec.Struct, frozen=True, gc=False):
    """What came of a job.

    delta: the weights after training less `job.weights`; of a job that measures, the gradient, or
    zeros with the loss alone. samples: examples processed; loss: mean
    over what the loss has counted in them, `counted`; None: each of them counts one. failure: the
    reason, if a number of it is not finite; everything else is then empty, and the other clients
    count on.
    """

    delta: Sequence[Tensor]
    buffers: Sequence[Tensor]
    samples: int
    loss: float
    failure: Failure | None = None
    counted: float | None = None


def not_finite(failure: Failure) -> Trained:
    """What comes of a job whose numbers are not all finite."""
    return Trained(delta=[], buffers=[], samples=0, loss=0.0, failure=failure)


def loss_failure(losses: Iterable[float]) -> Failure | None:
    """What is wrong with the losses of a job's steps; None where all are finite."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            # With the weights that everybody began with it is the client's data.
            return "its loss became not finite" if step else "its first loss is not finite"
    return None


class Engine:
    """What computes: the base of all engines, which have at least a name and `train`."""

    name: str
    why: str = ""
    """Why it is this engine that computes, in a line; empty where it was asked for."""
    look: Callable[[], None] | None = None
    """Called before each step, of a client that trains alone or of many at once; what it raises, a
    DureError, ends the training. Where the engine is in a process of its own it shows that there
    is progress: without any for the deadline, the process is given up."""
    batch_size: int | None = None
    """The batch size of a client's step; None is all of its data."""
    cohort: int = 1
    """How many jobs it likes to have at once; more are no faster a job."""
    chunk: int = 0
    """How many jobs each of its processes gets at once; 0 where it has none."""
    threads: int | None = None
    """The threads of operators in long steps of many clients; None leaves them as they are."""

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """Does the jobs and gives the results in their order, a few at a time.

        There is never more than a cohort in memory.
        """
        raise NotImplementedError

    def at_once(self, job: Job) -> int:
        """How many jobs like this one it likes to have at once."""
        return 1

    def alone(self, flops: Callable[[], float], threads: int | None) -> None:
        """Tells the engine that it has the cores of this process to itself.

        threads: that it may use for an operator; None is as many as there are. flops: of an
        example's step.
        """

    def close(self) -> None:
        """Ends its processes, where it has any."""

    def tune(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """As `train`, towards a client's own model and not towards the next global one."""
        return self.train(jobs)
