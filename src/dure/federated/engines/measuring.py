"""Measuring jobs as single training steps, whose updates are gradients.

a job of T steps  ->  T jobs of one step at the same weights, with w <- w - gradient
its result        <-  the mean over the counted weight of each step, of losses and of gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from msgspec.structs import replace

from dure.federated.engines.job import ClientJob, JobResult


def steps_of(jobs: Iterable[ClientJob]) -> Iterator[ClientJob]:
    """Yield the jobs, with each measuring job split into single steps."""
    for job in jobs:
        if job.measures is None:
            yield job
            continue
        for step in range(job.first_step, job.first_step + job.steps):
            yield replace(
                job, first_step=step, steps=1, mu=0.0, anchor=None, correction=None, lr_factor=1.0
            )


def results_of(jobs: Iterable[ClientJob], results: Iterator[JobResult]) -> Iterator[JobResult]:
    """Yield the results of the jobs, given the results of `steps_of` the same jobs."""
    for job in jobs:
        if job.measures is None:
            yield next(results)
        else:
            yield _joined(job, [next(results) for _ in range(job.steps)])


def _joined(job: ClientJob, steps: Sequence[JobResult]) -> JobResult:
    failed = next((one for one in steps if one.failure is not None), None)
    if failed is not None:
        return failed
    counts = [float(one.samples) if one.counted is None else one.counted for one in steps]
    counted = sum(counts)
    total = [torch.zeros_like(weights) for weights in job.weights]
    if job.measures == "gradient" and counted:
        for one, count in zip(steps, counts, strict=True):
            for sum_, moved in zip(total, one.delta, strict=True):
                # The step was one along the negative gradient.
                sum_.add_(moved, alpha=-count / counted)
    loss = sum(one.loss * count for one, count in zip(steps, counts, strict=True))
    return JobResult(
        delta=total,
        buffers=[buffer.clone() for buffer in job.buffers],
        samples=sum(one.samples for one in steps),
        loss=loss / counted if counted else 0.0,
        counted=counted,
    )
