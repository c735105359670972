"""What dure needs of a transformers.Trainer that trains a client."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from dure.contracts.own_loss import Counts
from dure.contracts.task import Task
from dure.trainers.hugging_face import HuggingFaceTrainer, check_state, check_trainer
from dure.trainers.hugging_face_task import counts_of, task_from_trainer
from dure.trainers.known import KnownTrainer


def known(trainer: Trainer, *, counts: Counts | None = None) -> KnownTrainer:
    """Return what dure needs of a trainer.

    counts: terms of the loss, as in `dure.OwnLoss`; None follows from the model. Raises ValueError
    for a trainer that cannot train a client.
    """
    check_trainer(trainer)
    found: Counts = counts_of(trainer.model) if counts is None else counts
    # The trainer trains by itself: the task has no loss, optimizer and schedule of it to take over.
    changes: dict[str, Any] = {"optimizer": Task.optimizer, "lr_schedule": None, "metrics": {}}

    def client(state: str) -> HuggingFaceTrainer:
        return HuggingFaceTrainer(trainer, state=check_state(state), counts=found)

    def task() -> Task:
        return task_from_trainer(trainer, counts=found, checks_loss=False, **changes)

    return KnownTrainer(client, task, "train")
