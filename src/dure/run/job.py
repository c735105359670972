"""What a run is told, where it stands, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from dure.contracts.stop import Stop
from dure.contracts.strategy import Proof, Strategy
from dure.contracts.task import Task
from dure.record.history import History
from dure.run.early import Best
from dure.run.fresh import FreshModel


@dataclass(frozen=True)
class Job:
    """What is to be done, the same on every rank.

    folder: where rank 0 writes; None writes nothing. resume: go on from the folder's checkpoint, if
        it has one.
    elastic: the ranks may be ended and started again at any time, more or fewer of them.
    check: whether what a strategy believes about the model is tried before training.
    proofs: what was tried while the job was prepared, and held.
    fresh: the model, made while the job was prepared; it does not travel to other processes.
    config: what config.json says was asked.
    told: whether callbacks hear of every step and evaluation (`dure.run.callbacks`).
    """

    task: Task
    strategy: Strategy
    stop: Stop
    seed: int
    label: str
    world: str
    parameters: int
    folder: Path | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    elastic: bool = False
    check: bool = True
    proofs: tuple[Proof, ...] = ()
    fresh: FreshModel | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    told: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run leaves.

    weights: of the whole model on rank 0, elsewhere what that rank holds. buffers: those that are
    not weights. best: the weights of the best evaluation, on rank 0, where no folder has them.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    history: History
    summary: dict[str, Any]
    best: Mapping[str, Tensor] | None = None


class Position(msgspec.Struct):
    """Where a run stands; it goes into every checkpoint.

    seconds: of training alone. metrics: of the newest evaluation, after the step last_evaluation
    (-1: there was none yet). numbers: what the strategy says about the newest step, by name.
    midway: whether it ended in the middle of the next step; samples and seconds are with that.
    lies: how many examples lie with each rank, where ranks have data of their own.
    best: the best evaluation so far, by a validation set.
    """

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float | None = None
    # msgspec copies a default that is empty, so no two positions share it.
    metrics: dict[str, float] = {}
    last_evaluation: int = -1
    numbers: dict[str, float | None] = {}
    midway: bool = False
    lies: list[int] = []
    best: Best | None = None
