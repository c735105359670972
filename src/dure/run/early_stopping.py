"""Early stopping: the best evaluation of a run so far, and the evaluations since.

For a metric m of the validation set, evaluated at steps t = 0, ...:

    best       the first step whose m_t is better than all before; its model is kept
    mark       the newest m_t that was better than the mark before by more than min_delta
    waited     evaluations since that mark; a run ends when they are `Stop.patience`

NaN is never better. Test data take no part: a model chosen by test metrics measures the quality of
the choice, and not that of the model.

All ranks know the same metrics and reach the same result. The state is part of checkpoints: a
resumed run has waited as long as an uninterrupted run.

Source: Prechelt 1998, "Early Stopping - But When?".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.record.history import lower_is_better

PREFIX = "validation_"
MONITOR = "validation_loss"
"""Default metric for the choice of the best model."""


class BestEvaluation(msgspec.Struct, frozen=True):
    """The best evaluation so far, and the state of patience.

    step, value: of the best evaluation. mark: value that patience compares with. waited:
    evaluations since the mark. A value is None if no evaluation has given a number.
    """

    step: int
    value: float | None
    mark: float | None
    waited: int = 0

    def next(
        self, step: int, value: float | None, falling: bool, min_delta: float
    ) -> BestEvaluation:
        """Return the state after the evaluation of `step`."""
        best = _better(value, self.value, falling, 0.0)
        counts = _better(value, self.mark, falling, min_delta)
        return BestEvaluation(
            step=step if best else self.step,
            value=value if best else self.value,
            mark=value if counts else self.mark,
            waited=0 if counts else self.waited + 1,
        )


def _better(value: float | None, than: float | None, falling: bool, by: float) -> bool:
    """Return whether `value` beats `than` by more than `by`; any number beats None."""
    if value is None or than is None:
        return value is not None
    return than - value > by if falling else value - than > by


def resumed_limits(stop: Stop, was: Stop) -> Stop:
    """Return the new limits of a resumed run, with the metric that chose its best model before.

    was: limits of the run so far. Raises ValueError if the new limits name another metric: values
    of two metrics cannot be compared.
    """
    if stop.monitor is None:
        return replace(stop, monitor=was.monitor)
    chosen_by = was.monitor or MONITOR
    if stop.monitor != chosen_by:
        raise ValueError(
            f"monitor is {stop.monitor!r}, but this run chooses its best model by {chosen_by}: "
            "leave monitor out"
        )
    return stop


def monitor_of(task: Task, stop: Stop) -> str | None:
    """Return the metric that chooses the best model; None without a validation set."""
    return None if task.validation is None else stop.monitor or MONITOR


def updated_best(
    best: BestEvaluation | None, stop: Stop, monitor: str, step: int, metrics: Mapping[str, float]
) -> BestEvaluation:
    """Return the best evaluation after another evaluation. best: the state before, or None."""
    measured = metrics.get(monitor, math.nan)
    value = measured if math.isfinite(measured) else None
    if best is None:
        return BestEvaluation(step, value, value)
    return best.next(step, value, lower_is_better(monitor), stop.min_delta)


def check_early(task: Task, stop: Stop, measured: Sequence[str]) -> None:
    """Raise ValueError if patience, min_delta or monitor cannot work with this task.

    measured: names of the metrics of an evaluation.
    """
    wanted = [name for name in ("patience", "monitor") if getattr(stop, name) is not None]
    if stop.patience is None and stop.min_delta:
        raise ValueError(f"min_delta={stop.min_delta} needs patience, and no patience is given")
    if wanted and task.validation is None:
        raise ValueError(
            f"{wanted[0]} needs a validation set, because test data are only for the final "
            "measurement, and the task has none: give Task(validation=0.1) or --validation 0.1, "
            "a fraction of the training data"
        )
    validated = [name for name in measured if name.startswith(PREFIX)]
    if stop.monitor is not None and stop.monitor not in validated:
        raise ValueError(
            f"monitor is {stop.monitor!r}, but only metrics of the validation set can end a run "
            f"or choose its model: {', '.join(validated)}"
        )
