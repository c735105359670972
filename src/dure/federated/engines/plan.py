"""Which examples each step of a job takes, and how the steps of many clients fit into one tensor.

The batches are those of `dure.data.batches.Batches`, whichever engine computes: batch t of a client
depends on (seed, client, t) alone. Clients of one cohort differ in their numbers of steps and in
their batch sizes b(i, t). They are sorted by steps, the longest first, so that those still at work
in step t are the first A(t). Step t is then a block of A(t) x B(t) rows, B(t) = max over i of b(i,
t); a row beyond b(i, t) repeats an example of the client and weighs 0. Wasted is what the block has
more than the batches have: only the last batches of epochs can differ.
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
from dure.federated.engines.job import Job

Rows = NDArray[numpy.int64]
Shares = NDArray[numpy.float64]


def batches(
    job: Job,
    batch_size: int | None,
    seed: int,
    ordered: bool = True,
    sampling: Sampling = SHUFFLED,
) -> tuple[Tensor, list[int]]:
    """The examples of the job's steps one after another, int64, and how many each step takes.

    batch_size: None is all of the client's examples in every step, in their own order. ordered:
    whether the order of the examples inside a batch matters, which is drawn even where one batch
    has them all. sampling: of all training data.
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
        # As many steps of this epoch as the job has, in one slice of its order.
        until = min(per_epoch, position + end - step)
        # Where one batch has all examples, their order inside it changes only roundings: who does
        # not mind (`ordered`) saves the draw.
        as_they_are = batch_size is None or (
            per_epoch == 1 and not ordered and sampling.weights is None
        )
        order = (
            job.indices
            if as_they_are
            else job.indices.index_select(0, own(seed, epoch, job.client))
        )
        # The last batch of an epoch may have one more than the others.
        end_of_part = n if until == per_epoch else until * size
        parts.append(
            order if until - position == per_epoch else order[position * size : end_of_part]
        )
        sizes += [size] * (until - position)
        if until == per_epoch:
            # An epoch's last batch has what is left.
            sizes[-1] = n - (per_epoch - 1) * size
        step += until - position
    return parts[0] if len(parts) == 1 else torch.cat(parts), sizes


@dataclass(frozen=True)
class Step:
    """One step of a cohort.

    rows: the examples, int64 (A, B). shares: float64 (A, B), the weight of each in its client's
    mean. sizes: of the batches, A of them.
    """

    rows: Tensor
    shares: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class Plan:
    """The steps of a cohort.

    by_steps: which of the jobs comes first, second, ... in it; sizes: each one's batches.
    """

    by_steps: Sequence[int]
    steps: Sequence[Step]
    sizes: Sequence[Sequence[int]]


def plan(
    jobs: Sequence[Job], batch_size: int | None, seed: int, sampling: Sampling = SHUFFLED
) -> Plan:
    """How the jobs are computed together."""
    count = [job.steps for job in jobs]
    # A stable sort: jobs with as many steps keep their order, and so their bits.
    by_steps = sorted(range(len(jobs)), key=count.__getitem__, reverse=True)
    examples: list[Rows] = []
    sizes: list[list[int]] = []
    for which in by_steps:
        visited, own = batches(jobs[which], batch_size, seed, False, sampling)
        examples.append(visited.numpy())
        sizes.append(own)
    # How many examples of each client the steps before have taken.
    at = [0] * len(jobs)
    steps: list[Step] = []
    for step in range(count[by_steps[0]]):
        now: list[Rows] = []
        now_sizes: list[int] = []
        for place, own in enumerate(sizes):
            if step >= len(own):
                break  # the clients after it have no more steps than it has
            end = at[place] + own[step]
            now.append(examples[place][at[place] : end])
            now_sizes.append(own[step])
            at[place] = end
        rows, shares = _block(now, now_sizes)
        steps.append(Step(torch.from_numpy(rows), torch.from_numpy(shares), now_sizes))
    return Plan(by_steps, steps, sizes)


def _block(batches: Sequence[Rows], sizes: Sequence[int]) -> tuple[Rows, Shares]:
    """The rows of a step and their shares."""
    block = len(batches), max(sizes)
    # All batches are as large: nothing has to be filled up.
    if min(sizes) == block[1]:
        return numpy.concatenate(batches).reshape(block), numpy.full(block, 1 / block[1])
    # Batches of different sizes: rows that weigh 0 repeat an example, for they have to be some
    # valid index, and what they compute has to be finite (0 · NaN is NaN).
    rows = numpy.empty(block, numpy.int64)
    shares = numpy.zeros(block)
    for place, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        rows[place, :size] = batch
        rows[place, size:] = batch[0]
        shares[place, :size] = 1 / size
    return rows, shares
