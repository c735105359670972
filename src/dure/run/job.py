"""The description of a run, its position, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.contracts.learner import Proof
from dure.contracts.stop import Stop
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.record.history import History
from dure.run.early_stopping import BestEvaluation
from dure.run.run_model import RunModel


@dataclass(frozen=True)
class Job:
    """The work of a run, the same on every rank.

    Args:
        folder: folder that rank 0 writes to; None writes nothing.
        resume: continue from the folder's checkpoint, if there is one.
        elastic: ranks may stop and restart at any time, more or fewer of them.
        check: whether the strategy's assumptions about the model are tested before training.
        proofs: tests of the strategy that passed while the job was prepared.
        fresh: the model made while the job was prepared; does not travel to other processes.
        config: content of config.json.
        dtype: dtype of most of the model's numbers; None without floating-point parameters.
        peak_flops: operations per second of a worker's device; None for the device's own.
        told: whether callbacks receive every step and evaluation (`dure.run.callbacks`).
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
    fresh: RunModel | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    peak_flops: float | None = None
    told: bool = False


@dataclass(frozen=True)
class RunOutcome:
    """Results of a run.

    weights: of the whole model on rank 0; on other ranks the part that the rank stores. buffers:
    the model's buffers. best: on rank 0, the weights of the best evaluation, if no run folder has
    them.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    history: History
    summary: dict[str, Any]
    best: Mapping[str, Tensor] | None = None


class Position(msgspec.Struct):
    """Progress of a run; part of every checkpoint.

    Args:
        seconds: training time alone.
        metrics: metrics of the newest evaluation.
        last_evaluation: step of the newest evaluation; -1 before the first evaluation.
        numbers: numbers that the strategy reports about the newest step, by name.
        midway: whether the run ended in the middle of the next step, whose samples and seconds are
            then included.
        lies: number of examples of each rank, if ranks have data of their own.
        best: best evaluation so far on the validation set.
    """

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float | None = None
    # msgspec copies an empty mutable default, so no two positions share it.
    metrics: dict[str, float] = {}
    last_evaluation: int = -1
    numbers: dict[str, float | None] = {}
    midway: bool = False
    lies: list[int] = []
    best: BestEvaluation | None = None
