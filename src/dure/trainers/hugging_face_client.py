"""A transformers.Trainer that trains a client, and its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from dure.contracts.own_loss import Counts
from dure.contracts.task import Task
from dure.trainers.hugging_face import HuggingFaceTrainer, check_trainer
from dure.trainers.hugging_face_task import counts_of, task_from_trainer
from dure.trainers.integration import BetweenRounds, TrainedClient, TrainerIntegration


def integrate(trainer: Trainer, *, counts: Counts | None = None) -> TrainerIntegration:
    """Return the integration of a trainer.

    counts: terms of the loss, as in `dure.OwnLoss`; None follows from the model. Raises ValueError
    for a trainer that cannot train a client.
    """
    check_trainer(trainer)
    # Before the patch takes its place.
    train = trainer.train
    found: Counts = counts_of(trainer.model) if counts is None else counts

    def client(
        state: BetweenRounds, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> TrainedClient:
        if given or named:
            raise ValueError(
                "train of a patched trainer takes no arguments: the federation says what is trained"
            )
        # The trainer trains by itself: the task takes over no loss, optimizer and schedule of it.
        task = task_from_trainer(
            trainer,
            counts=found,
            checks_loss=False,
            optimizer=Task.optimizer,
            lr_schedule=None,
            metrics={},
        )
        return TrainedClient(HuggingFaceTrainer(trainer, train, state, found), task)

    return TrainerIntegration("train", client)
