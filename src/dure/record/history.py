"""The history: a line a step, a line an evaluation; and when a target was reached.

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
    """After a step or round: cumulative counters of rank 0 (a federation's server).

    A run keeps one for every step. With gc=False the garbage collector passes them over: they are
    part of no cycle.

    loss: None where nothing was learned, such as in a round in which no update counted. numbers:
    what else the strategy says about the round, by name; None where it says nothing.
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
    """An evaluation: the metrics, and cumulative counters summed over all ranks or clients.

    A metric that is not finite is None: JSON has no other word for it. numbers: what the strategy
    says of all steps so far, by name; None where it says nothing.
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

    def __post_init__(self) -> None:
        self.metrics = finite(self.metrics)


Record = Step | Evaluation


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """The metrics, None for those that are NaN or infinite."""
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
"""The words at the end of the names of metrics that are better where they are lower."""


WHOSE = ("client_", "personal_", "newest_", "frozen_newest_")
"""How metrics begin that clients measure on their own data."""

SPREAD = ("_mean", "_p10", "_p50", "_p90", "_worst")
"""How the names of numbers end that tell how a metric of clients is spread over them."""


def is_spread(metric: str) -> bool:
    """Whether it tells how a metric is spread over clients, such as client_accuracy_p10."""
    return metric.startswith(WHOSE) and metric.endswith(SPREAD)


def judging(metric: str) -> tuple[bool, bool]:
    """By which of several metrics runs are judged: the least of these; a validation metric before
    others, and then one that rises."""
    return not metric.startswith("validation"), lower_is_better(metric)


def lower_is_better(metric: str) -> bool:
    """Whether a metric falls: losses, errors and the like (`FALL`) do, every other one rises.

    So do those of the worst tenth of clients, whose names end with _p10, and what else tells of
    their spread. Case does not matter.
    """
    own = metric.removesuffix("_p10")
    for suffix in SPREAD if is_spread(metric) else ():
        own = own.removesuffix(suffix)
    # At its end: "loss_scale" is no loss, and "client_loss" is one. Whole words: an "answer" is no
    # "wer".
    words = re.sub(r"[\W_]+", "_", own.lower())
    return f"_{words}".endswith(tuple(f"_{fall}" for fall in FALL))


def reaches(metric: str, value: float, target: float) -> bool:
    """Whether `value` is at least as good as `target`."""
    return value <= target if lower_is_better(metric) else value >= target


def steps_to_target(
    steps: Sequence[float], values: Sequence[float], target: float, falling: bool = False
) -> float | None:
    """Where the monotone curve first reaches `target`, interpolated linearly; None if it does not.

    steps, values: the evaluations, in order. falling: lower values are better.
    """
    # With the sign turned, a falling metric rises as well, and one rule serves both.
    sign = -1.0 if falling else 1.0
    best = float("-inf")
    before = 0.0
    for step, value in zip(steps, values, strict=True):
        better = max(best, sign * value)
        if better >= sign * target:
            # The part of the way, from the best so far to this value, that lies below the target.
            # Before the first evaluation there is none: what it reaches is reached there.
            share = 1.0 if best == float("-inf") else (sign * target - best) / (better - best)
            return before + share * (step - before) if best != float("-inf") else float(step)
        # From the newest evaluation on, also where it was no better: the curve is flat until there.
        best = better
        before = float(step)
    return None


class History:
    """Records in the order in which they happened."""

    # Made once: a type is compiled when its decoder is made.
    _decoder: ClassVar[msgspec.json.Decoder[Record]] = msgspec.json.Decoder(Record)
    _encoder: ClassVar[msgspec.json.Encoder] = msgspec.json.Encoder()

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records = list(records)

    def append(self, record: Record) -> None:
        """Adds what happened last."""
        self.records.append(record)

    @property
    def steps(self) -> list[Step]:
        """The lines of steps or rounds alone, in order."""
        return [record for record in self.records if isinstance(record, Step)]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The lines of evaluations alone, in order."""
        return [record for record in self.records if isinstance(record, Evaluation)]

    def curve(self, metric: str, against: str = "step") -> tuple[list[float], list[float]]:
        """(x, y) of a metric over the evaluations where it was finite.

        against: what x is: any field of `Evaluation`, such as "bytes_sent".
        """
        pairs = [(float(getattr(e, against)), e.metrics.get(metric)) for e in self.evaluations]
        return [x for x, y in pairs if y is not None], [y for _, y in pairs if y is not None]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps or rounds, values) of a number that the strategy reports: "primal_residual"."""
        pairs = [(step.step, (step.numbers or {}).get(name)) for step in self.steps]
        return [x for x, y in pairs if y is not None], [y for _, y in pairs if y is not None]

    def to_target(self, metric: str, target: float) -> float | None:
        """Steps or rounds until `metric` reached `target`."""
        return steps_to_target(*self.curve(metric), target, falling=lower_is_better(metric))

    def best(self) -> dict[str, float]:
        """The best value of every metric."""
        # In order of first appearance, which is that of tables.
        names = dict.fromkeys(
            name for e in self.evaluations for name, v in e.metrics.items() if v is not None
        )
        return {
            name: (min if lower_is_better(name) else max)(self.curve(name)[1]) for name in names
        }

    @classmethod
    def encode(cls, record: Record) -> bytes:
        """One line of history.jsonl."""
        return cls._encoder.encode(record) + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> History:
        """The history in `text`; a last line that was cut off by a kill is left out."""
        # A line is whole if its end was written; a text without any has none.
        whole = text[: text.rfind(b"\n") + 1]
        return cls(cls._decoder.decode(line) for line in whole.splitlines())

    @classmethod
    def decode_until(cls, text: bytes, step: int) -> History:
        """The history up to `step`, whatever is damaged after it."""
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
        """The records up to `step`: the history of a run resumed from that step's checkpoint."""
        return History(record for record in self.records if record.step <= step)

    def encoded(self) -> bytes:
        """The content of history.jsonl."""
        return b"".join(map(self.encode, self.records))
