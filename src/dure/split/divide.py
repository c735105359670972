"""Choice between the two ways to divide a model, by its task."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.split.cutting import TracedDividedModel
from dure.split.divided_model import DividedModel
from dure.split.separate_models.sides import SeparateDividedModel
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.parts import JoinedTask, ModelParts


def divided(
    task: Task, model: nn.Module, train: Examples, at: Sequence[str], examples: int, seed: int
) -> DividedModel:
    """Return the divided model: by its files if the task has two, else cut at `at`.

    Args:
        task: the task.
        model: the model.
        train: the clients' examples.
        at: the places of the cuts.
        examples: number of examples of a client's batch.
        seed: the run's seed.

    Raises:
        ValueError: the model cannot be divided in this way.
    """
    if isinstance(task, JoinedTask) and isinstance(model, ModelParts):
        return SeparateDividedModel(task, model, train, examples, seed)
    return TracedDividedModel(task, model, at, examples, seed, CountedLoss(task.loss, train))
