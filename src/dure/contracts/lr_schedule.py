"""Learning rate schedules: warm-up, decay.

    lr at step t = lr of the optimizer's group · schedule(t),    t = 0, 1, ...

A schedule is a function of the step's number alone, like `lr_lambda` of
`torch.optim.lr_scheduler.LambdaLR`: it has no state, so that a resumed run, and every rank, has the
rates of the whole run. In a federation t is the round of the global model from which a client
starts.

Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD" (warm-up); Loshchilov and Hutter 2017,
"SGDR" (cosine).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from dure.errors import described

LRSchedule = Callable[[int], float]


def factor_at(schedule: LRSchedule | None, step: int) -> float:
    """Return the factor of the learning rates at a step.

    Raises ValueError unless the factor is finite and at least 0.
    """
    if schedule is None:
        return 1.0
    factor = float(schedule(step))
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"lr_schedule({step}) is {factor}, but a factor of the learning rate has to be 0 or "
            "more"
        )
    return factor


@dataclass(frozen=True)
class StepSchedule:
    """Schedule of a trainer of another library, whose t is a step, and never a round.

    factor: factor of the learning rates by step.
    """

    factor: LRSchedule

    def __call__(self, step: int) -> float:
        return float(self.factor(step))


def check_counts_rounds(schedule: LRSchedule | None) -> None:
    """Check that a schedule may count rounds. Raises ValueError for a `StepSchedule`."""
    if isinstance(schedule, StepSchedule):
        raise ValueError(
            "the trainer's schedule counts steps, and a federation rounds: give the task one of "
            "its own (lr_schedule=…), or None"
        )


def check_schedule(schedule: LRSchedule | None, optimizer: Optimizer) -> None:
    """Raise ValueError if a schedule and an optimizer do not fit together.

    Either the schedule returns no factor at step 0, or the optimizer has no learning rate.
    """
    if schedule is None:
        return
    try:
        factor_at(schedule, 0)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"lr_schedule(0) raised {described(error)}; give a function of the step that returns "
            "a factor, such as lr_lambda of torch's LambdaLR"
        ) from error
    groups = getattr(optimizer, "param_groups", None)  # some only look like one
    if not groups or any(group.get("lr") is None for group in groups):
        raise ValueError(
            f"lr_schedule multiplies learning rates, and {type(optimizer).__name__} has no "
            "learning rate"
        )


class ScheduledRates:
    """Learning rates of a new optimizer, step by step."""

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule | None) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        rates = [group["lr"] for group in optimizer.param_groups] if schedule is not None else []
        # Clones: a learning rate may be a tensor, which an optimizer or its user may write into.
        self.first = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def at(self, step: int) -> None:
        """Set the learning rates of a step. Without a schedule they stay unchanged."""
        if self.schedule is None:
            return
        factor = factor_at(self.schedule, step)
        for group, first in zip(self.optimizer.param_groups, self.first, strict=True):
            # A tensor rate is replaced by a new tensor: the task's own tensor stays unchanged.
            group["lr"] = first * factor


def scale(optimizer: Optimizer, factor: float) -> None:
    """Multiply the current learning rates. A factor of 1 leaves the optimizer unchanged."""
    if factor != 1:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
