"""Model FLOPs utilisation (MFU) of accelerators.

    MFU = operations of the model's steps / operations that the devices could have made meanwhile

Operations of the model are those of forward and backward (`dure.tasks.flops`), without the
recomputation of activations. The time is the training time of the run, with communication and the
reading of batches. The peak of a device is in a table (`dure.machine.peak_flops`), or given by the
user.

Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dure.contracts.learner import Learner
from dure.contracts.world import RankContext
from dure.machine.devices import device_of, hardware_name, is_cpu
from dure.machine.peak_flops import peak_flops_of
from dure.record.meter import Counters
from dure.run.job import Job


def accelerators_of(job: Job, context: RankContext) -> list[torch.device]:
    """Return the accelerators on which this process computes."""
    named = [device_of(name) for name in job.strategy.run_traits.computes_on]
    found = dict.fromkeys(named or context.devices)
    return [device for device in found if not is_cpu(device)]


class Utilisation:
    """Counts operations of a rank that computes on one accelerator, if its peak is known.

    flops: operations of a full step in this process (`Learner.flops_per_step`).
    """

    def __init__(self, job: Job, context: RankContext, learner: Learner, flops: float) -> None:
        devices = accelerators_of(job, context)
        self._flops = flops
        self._peak = _peak(job, devices) if _is_counted(job, context, flops, devices) else None
        self._most = 0

    def step(self, counters: Counters, samples: int, seconds: float) -> None:
        """Count a step over so many examples of all ranks, which took so many seconds."""
        if self._peak is None:
            return
        # The last batch of a pass may be smaller than a full one.
        self._most = max(self._most, samples)
        counters.model_flops += self._flops * samples / self._most if samples else 0.0
        counters.available_flops += self._peak * seconds


def _is_counted(
    job: Job, context: RankContext, flops: float, devices: Sequence[torch.device]
) -> bool:
    """Return whether steps of this job are steps of the optimizer on one accelerator."""
    steps = job.strategy.traits.unit == "step" and context.kind == "ranks"
    return steps and len(devices) == 1 and math.isfinite(flops)


def _peak(job: Job, devices: Sequence[torch.device]) -> float | None:
    """Return the device's operations per second: the user's number, or the table's."""
    if job.peak_flops is not None:
        return job.peak_flops
    reduced = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = reduced.get(job.task.precision, job.dtype)
    return None if dtype is None else peak_flops_of(hardware_name(devices[0]), dtype)
