"""The history: a line a step, a line an evaluation; and the steps to reach a target.

Steps to a target are counted as McMahan et al. 2017 count rounds: the curve is made monotone (the
best value so far), and the crossing is interpolated linearly between evaluations. All systems are
counted the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import msgspec


class Step(msgspec.Struct, tag_field="kind", tag="step", gc=False, omit_defaults=True):
    """Record of a step or round: cumulative counters of rank 0 (a federation's server).

    A run stores a record for every step. gc=False excludes them from garbage collection, since they
    are part of no reference cycle.

    loss: None if nothing was trained, such as in a round without a valid update. numbers: further
    numbers of the strategy, by name; None without any.
    """

    step: int
    epoch: float
    samples: int
    loss: float | None
    seconds: float
    bytes_sent: int
    bytes_received: int
    compute_seconds: float
    communication_seconds: float
    idle_seconds: float
    numbers: dict[str, float | None] | None = None


class Evaluation(msgspec.Struct, tag_field="kind", tag="evaluation", omit_defaults=True):
    """Record of an evaluation: metrics, and cumulative counters summed over all ranks or clients.

    A metric that is not finite is None, since JSON has no NaN. numbers: the strategy's numbers
    about all steps so far, by name; None without any. peak_device_memory: allocated bytes of an
    accelerator; 0 without one.
    """

    step: int
    epoch: float
    samples: int
    loss: float | None
    seconds: float
    metrics: dict[str, float | None]
    bytes_sent: int
    bytes_received: int
    compute_seconds: float
    communication_seconds: float
    idle_seconds: float
    peak_memory: int
    numbers: dict[str, float | None] | None = None
    peak_device_memory: int = 0

    def __post_init__(self) -> None:
        self.metrics = finite(self.metrics)


Record = Step | Evaluation


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics, with None for NaN and infinity."""
    return {name: v if v is not None and math.isfinite(v) else None for name, v in metrics.items()}


FALL = (
    "loss",
    "logloss",
    "error",
    "error_rate",
    "rmse",
    "nrmse",
    "mse",
    "nmse",
    "mae",
    "nmae",
    "mape",
    "smape",
    "perplexity",
    "nll",
    "wer",
    "cer",
    "distance",
    "residual",
    "failures",
)
"""Last words of the names of metrics for which lower values are better."""


WHOSE = ("client_", "personal_", "newest_", "frozen_newest_")
"""Prefixes of metrics that clients measure on their own data."""

SPREAD = ("_mean", "_p10", "_p50", "_p90", "_worst")
"""Suffixes of the statistics of a metric over clients."""


def is_spread(metric: str) -> bool:
    """Return whether a name is a statistic over clients, such as client_accuracy_p10."""
    return metric.startswith(WHOSE) and metric.endswith(SPREAD)


def judging(metric: str) -> tuple[bool, bool]:
    """Return a sort key whose least value is the main metric of runs.

    Validation metrics precede others; among each, metrics that rise precede metrics that fall.
    """
    return not metric.startswith("validation"), lower_is_better(metric)


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better, by its name (`FALL`); others rise.

    Statistics over clients, such as the worst tenth with the suffix _p10, follow their metric. Case
    does not matter.
    """
    own = metric.removesuffix("_p10")
    for suffix in SPREAD if is_spread(metric) else ():
        own = own.removesuffix(suffix)
    # At the end: "loss_scale" is no loss, and "client_loss" is one. Whole words: "answer" is no
    # "wer".
    words = re.sub(r"[\W_]+", "_", own.lower())
    return f"_{words}".endswith(tuple(f"_{fall}" for fall in FALL))


def reaches(metric: str, value: float, target: float) -> bool:
    """Return whether `value` is at least as good as `target`."""
    return value <= target if lower_is_better(metric) else value >= target


def steps_to_target(
    steps: Sequence[float], values: Sequence[float], target: float, falling: bool = False
) -> float | None:
    """Return the step where the monotone curve reaches `target`, interpolated linearly, or None.

    steps, values: the evaluations, in order. falling: lower values are better.
    """
    # With the sign flipped, a falling metric rises as well, so the same rule applies.
    sign = -1.0 if falling else 1.0
    best = float("-inf")
    before = 0.0
    for step, value in zip(steps, values, strict=True):
        better = max(best, sign * value)
        if better >= sign * target:
            # The share of the interval from the best so far to this value that is below the target.
            # The first evaluation has no interval: it reaches the target itself.
            share = 1.0 if best == float("-inf") else (sign * target - best) / (better - best)
            return before + share * (step - before) if best != float("-inf") else float(step)
        # From the newest evaluation on, even without improvement: the curve is flat until there.
        best = better
        before = float(step)
    return None


class History:
    """Records in chronological order."""

    # Made once, because making a decoder compiles its type.
    _decoder: ClassVar[msgspec.json.Decoder[Record]] = msgspec.json.Decoder(Record)
    _encoder: ClassVar[msgspec.json.Encoder] = msgspec.json.Encoder()

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records = list(records)

    def append(self, record: Record) -> None:
        """Add the newest record."""
        self.records.append(record)

    @property
    def steps(self) -> list[Step]:
        """Records of steps or rounds, in order."""
        return [record for record in self.records if isinstance(record, Step)]

    @property
    def evaluations(self) -> list[Evaluation]:
        """Records of evaluations, in order."""
        return [record for record in self.records if isinstance(record, Evaluation)]

    def curve(self, metric: str, against: str = "step") -> tuple[list[float], list[float]]:
        """Return (x, y) of a metric over the evaluations at which it was finite.

        against: field of `Evaluation` for x, such as "bytes_sent".
        """
        pairs = [(float(getattr(e, against)), e.metrics.get(metric)) for e in self.evaluations]
        return [x for x, y in pairs if y is not None], [y for _, y in pairs if y is not None]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps or rounds, values) of a strategy's number, such as "primal_residual"."""
        pairs = [(step.step, (step.numbers or {}).get(name)) for step in self.steps]
        return [x for x, y in pairs if y is not None], [y for _, y in pairs if y is not None]

    def to_target(self, metric: str, target: float) -> float | None:
        """Return the steps or rounds until `metric` reached `target`; None if it did not."""
        return steps_to_target(*self.curve(metric), target, falling=lower_is_better(metric))

    def best(self) -> dict[str, float]:
        """Return the best value of every metric."""
        # In order of first appearance, which is that of tables.
        names = dict.fromkeys(
            name for e in self.evaluations for name, v in e.metrics.items() if v is not None
        )
        return {
            name: (min if lower_is_better(name) else max)(self.curve(name)[1]) for name in names
        }

    @classmethod
    def encode(cls, record: Record) -> bytes:
        """Return a record as a line of history.jsonl."""
        return cls._encoder.encode(record) + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> History:
        """Return the history in `text`, without an incomplete last line."""
        # A line is complete if its line break was written.
        whole = text[: text.rfind(b"\n") + 1]
        return cls(cls._decoder.decode(line) for line in whole.splitlines())

    @classmethod
    def decode_until(cls, text: bytes, step: int) -> History:
        """Return the history up to `step`, whatever damage follows."""
        records: list[Record] = []
        for line in text[: text.rfind(b"\n") + 1].splitlines():
            try:
                record = cls._decoder.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                break
            if record.step > step:
                break
            records.append(record)
        return cls(records)

    def until(self, step: int) -> History:
        """Return the records up to `step`: the history of a run resumed from its checkpoint."""
        return History(record for record in self.records if record.step <= step)

    def encoded(self) -> bytes:
        """Return the content of history.jsonl."""
        return b"".join(map(self.encode, self.records))
