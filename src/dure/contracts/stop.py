"""Limits of a run; the first limit that is reached ends the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dure.arguments import SuggestsArguments, above, at_least, check_ranges
from dure.record.history import reaches
from dure.settings import parse_fields, read_bytes

SILENT = 10
"""Epochs after which a run ends that only bytes would end, if no byte has been sent."""


@dataclass(frozen=True)
class Stop(SuggestsArguments, common=True):
    """Limits of a run, whichever comes first; None is no limit.

    Args:
        epochs: passes over the training data, counted in examples over all workers.
        steps: optimizer steps, for strategies that count steps.
        rounds: federated rounds, for strategies that count rounds.
        seconds: training time, evaluation and checkpoints left out.
        target: metric to value, such as {"test_accuracy": 0.99}; all must be reached at one
            evaluation.
        bytes: bytes sent by all workers, a server and its clients included, each counted once; also
            as
            text, such as "100MB".
        patience: successive evaluations after the best one without an improvement of a metric of
            the
            validation set; needs Task(validation=...).
        monitor: metric for patience, validation_loss or validation_<metric>. The best model by this
            metric is saved, with patience or without. None: validation_loss.
        min_delta: minimum improvement of an evaluation that counts for patience.
    """

    epochs: float | None = field(default=None, metadata=above(0))
    steps: int | None = field(default=None, metadata=above(0))
    rounds: int | None = field(default=None, metadata=above(0))
    seconds: float | None = field(default=None, metadata=above(0))
    target: Mapping[str, float] | None = None
    bytes: float | None = field(default=None, metadata=above(0))
    patience: int | None = field(default=None, metadata=above(0))
    monitor: str | None = None
    min_delta: float = field(default=0.0, metadata=at_least(0))

    def __post_init__(self) -> None:
        parse_fields(self, {"bytes": read_bytes})

    @property
    def bytes_alone(self) -> bool:
        """Whether bytes are the only limit."""
        return self.bytes is not None and replace(self, monitor=None) == Stop(bytes=self.bytes)

    def check(self, unit: str) -> None:
        """Raise ValueError if a limit is not positive, or if no limit can end the run.

        unit: "step" or "round", whichever the run counts.
        """
        check_ranges(self)
        # Limits of the other unit are allowed, since one Stop serves a comparison, but end nothing.
        own = self.steps if unit == "step" else self.rounds
        others = (self.epochs, self.seconds, self.bytes, self.patience)
        if own is None and all(one is None for one in others) and not self.target:
            other = "rounds" if unit == "step" else "steps"
            hint = (
                f"; {other} do not apply: this system counts {unit}s"
                if getattr(self, other) is not None
                else ""
            )
            raise ValueError(
                f"this run has no stopping condition: give epochs, {unit}s, seconds, bytes, "
                f"patience or a target{hint}"
            )

    def reached(
        self,
        unit: str,
        step: int,
        samples: int,
        examples: int,
        metrics: Mapping[str, float],
        travelled: float = 0,
    ) -> str | None:
        """Return the name of the limit that is reached, other than time, or None.

        Args:
            unit: "step" or "round", whichever the run counts.
            step: steps or rounds done.
            samples: training examples processed by all workers.
            examples: training examples of an epoch.
            metrics: values of the newest evaluation.
            travelled: bytes that all workers have sent.
        """
        own = self.steps if unit == "step" else self.rounds
        if own is not None and step >= own:
            return f"{unit}s"
        # Tolerance for rounding: 0.7 epochs of 10 examples are 7.000000000000001 in floats.
        if self.epochs is not None and samples >= self.epochs * examples * (1 - 1e-12):
            return "epochs"
        if self.bytes is not None and travelled >= self.bytes:
            return "bytes"
        # Threads that share their memory send nothing, and bytes alone would never end them.
        if self.bytes_alone and not travelled and samples >= SILENT * examples:
            return "epochs"
        if self.target and all(
            name in metrics and reaches(name, metrics[name], v) for name, v in self.target.items()
        ):
            return "target"
        return None
