"""Plan of a batched cohort: the examples of each step, padded to a tensor for all clients.

The batches are the batches of `dure.data.batches.Batches` in every engine: batch t of a client
depends on (seed, client, t) alone. Clients of a cohort differ in their numbers of steps and in
their batch sizes b(i, t). They are sorted by steps, the longest first, so that the clients still at
work in step t are the first A(t). Step t is then a block of A(t) x B(t) rows, B(t) = max over i of
b(i, t); a row beyond b(i, t) repeats an example of the client and weighs 0. Only these padding rows
are wasted, and only the last batches of epochs need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from dure.data.batches import batches_per_epoch
from dure.data.sampling import SHUFFLED, Sampling
from dure.federated.engines.job import ClientJob

RowIndices = NDArray[numpy.int64]
Shares = NDArray[numpy.float64]


def batches(
    job: ClientJob,
    batch_size: int | None,
    seed: int,
    ordered: bool = True,
    sampling: Sampling = SHUFFLED,
) -> tuple[Tensor, list[int]]:
    """Return the examples of the job's steps in order, int64, and the batch size of each step.

    Args:
        job: a job.
        batch_size: None is all of the client's examples in every step, in their own order.
        seed: of the run.
        ordered: whether the order of the examples inside a batch matters; if so, it is drawn even
            for a single batch of all examples.
        sampling: of all training data.
    """
    own = sampling.order(0, job.indices)
    n = job.indices.numel()
    size = n if batch_size is None else min(batch_size, n)
    per_epoch = batches_per_epoch(n, size, job.joins)
    parts: list[Tensor] = []
    sizes: list[int] = []
    step = job.first_step
    end = step + job.steps
    while step < end:
        epoch, position = divmod(step, per_epoch)
        # All steps of this epoch that the job has, in a single slice of its order.
        until = min(per_epoch, position + end - step)
        # If a batch has all examples, their order inside it changes only roundings: callers without
        # `ordered` save the draw.
        as_they_are = batch_size is None or (
            per_epoch == 1 and not ordered and sampling.weights is None
        )
        order = (
            job.indices
            if as_they_are
            else job.indices.index_select(0, own(seed, epoch, job.client))
        )
        # The last batch of an epoch may have one example more than the others.
        end_of_part = n if until == per_epoch else until * size
        parts.append(
            order if until - position == per_epoch else order[position * size : end_of_part]
        )
        sizes += [size] * (until - position)
        if until == per_epoch:
            # An epoch's last batch has the remaining examples.
            sizes[-1] = n - (per_epoch - 1) * size
        step += until - position
    return parts[0] if len(parts) == 1 else torch.cat(parts), sizes


@dataclass(frozen=True)
class CohortStep:
    """A step of a cohort.

    rows: the examples, int64 (A, B). shares: float64 (A, B), the weight of each row in its client's
    mean. sizes: of the batches, A of them.
    """

    rows: Tensor
    shares: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class CohortPlan:
    """The steps of a cohort.

    by_steps: job indices in the order of the plan; sizes: batch sizes of each job, in this order.
    """

    by_steps: Sequence[int]
    steps: Sequence[CohortStep]
    sizes: Sequence[Sequence[int]]


def plan(
    jobs: Sequence[ClientJob], batch_size: int | None, seed: int, sampling: Sampling = SHUFFLED
) -> CohortPlan:
    """Return the plan for computing the jobs together."""
    count = [job.steps for job in jobs]
    # A stable sort: jobs with equal numbers of steps keep their order, and so their bits.
    by_steps = sorted(range(len(jobs)), key=count.__getitem__, reverse=True)
    examples: list[RowIndices] = []
    sizes: list[list[int]] = []
    for which in by_steps:
        visited, own = batches(jobs[which], batch_size, seed, False, sampling)
        examples.append(visited.numpy())
        sizes.append(own)
    # Number of examples of each client that earlier steps have taken.
    at = [0] * len(jobs)
    steps: list[CohortStep] = []
    for step in range(count[by_steps[0]]):
        now: list[RowIndices] = []
        now_sizes: list[int] = []
        for place, own in enumerate(sizes):
            if step >= len(own):
                break  # the clients after it have at most as many steps
            end = at[place] + own[step]
            now.append(examples[place][at[place] : end])
            now_sizes.append(own[step])
            at[place] = end
        rows, shares = _block(now, now_sizes)
        steps.append(CohortStep(torch.from_numpy(rows), torch.from_numpy(shares), now_sizes))
    return CohortPlan(by_steps, steps, sizes)


def _block(batches: Sequence[RowIndices], sizes: Sequence[int]) -> tuple[RowIndices, Shares]:
    """Return the rows of a step and their shares."""
    block = len(batches), max(sizes)
    # All batches have the same size: no padding.
    if min(sizes) == block[1]:
        return numpy.concatenate(batches).reshape(block), numpy.full(block, 1 / block[1])
    # Batches of different sizes: rows of weight 0 repeat an example, because they need a valid
    # index, and finite values (0 · NaN is NaN).
    rows = numpy.empty(block, numpy.int64)
    shares = numpy.zeros(block)
    for place, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        rows[place, :size] = batch
        rows[place, size:] = batch[0]
        shares[place, :size] = 1 / size
    return rows, shares
