"""When a run ends: at whichever limit comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dure.arguments import Named
from dure.record.history import reaches
from dure.settings import parse_fields, read_bytes

SILENT = 10
"""Epochs after which a run ends that only bytes are to end, and in which none has travelled."""


@dataclass(frozen=True)
class Stop(Named, common=True):
    """Limits of a run, whichever comes first; None is no limit.

    Args:
        epochs: passes over the training data, counted in examples over all workers.
        steps: optimizer steps, for strategies that count steps.
        rounds: federated rounds, for strategies that count rounds.
        seconds: training time, evaluation and checkpoints left out.
        target: metric to value, such as {"test_accuracy": 0.99}; all are reached at one evaluation.
        bytes: that have travelled, each counted once: what all workers have sent, a server and its
            clients too; also as text, such as "100MB".
        patience: evaluations in a row after the best one in which a metric of the validation set
            gets no better; it needs Task(validation=...).
        monitor: that metric, validation_loss or validation_<metric>. By it the best model is kept,
            with patience or without. None: validation_loss.
        min_delta: by how much an evaluation has to be better to count for patience.
    """

    epochs: float | None = None
    steps: int | None = None
    rounds: int | None = None
    seconds: float | None = None
    target: Mapping[str, float] | None = None
    bytes: float | None = None
    patience: int | None = None
    monitor: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        parse_fields(self, {"bytes": read_bytes})

    @property
    def bytes_alone(self) -> bool:
        """Whether nothing but bytes ends a run."""
        return self.bytes is not None and replace(self, monitor=None) == Stop(bytes=self.bytes)

    def check(self, unit: str) -> None:
        """Raises ValueError if a limit is not positive, or none ever ends a run.

        unit: what the run counts, "step" or "round".
        """
        for name in ("epochs", "steps", "rounds", "seconds", "bytes", "patience"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN is not either
                raise ValueError(f"{name} is {value}, but a run ends after more than 0 {name}")
        if not self.min_delta >= 0:
            raise ValueError(f"min_delta is {self.min_delta}, but it is 0 or more")
        # Limits of the other unit are allowed, since one Stop serves a comparison, but end nothing.
        own = self.steps if unit == "step" else self.rounds
        others = (self.epochs, self.seconds, self.bytes, self.patience)
        if own is None and all(one is None for one in others) and not self.target:
            other = "rounds" if unit == "step" else "steps"
            hint = (
                f"; {other} do not count here, it counts {unit}s"
                if getattr(self, other) is not None
                else ""
            )
            raise ValueError(
                f"nothing ends this run: give epochs, {unit}s, seconds, bytes, patience or a "
                f"target{hint}"
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
        """Which limit, other than time, is reached.

        metrics: of the newest evaluation; examples: those of an epoch; travelled: bytes that all
        workers have sent.
        """
        own = self.steps if unit == "step" else self.rounds
        if own is not None and step >= own:
            return f"{unit}s"
        # 0.7 epochs of 10 examples are 7, and not the 7.000000000000001 that floats make of it
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
