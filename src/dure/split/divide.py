"""Choice between the two ways to divide a model, by its task."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.split.apart.sides import Apart
from dure.split.cutting import Cut
from dure.split.divided import Divided
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.parts import JoinedTask, ModelParts


def divided(
    task: Task, model: nn.Module, train: Examples, at: Sequence[str], examples: int, seed: int
) -> Divided:
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
        return Apart(task, model, train, examples, seed)
    return Cut(task, model, at, examples, seed, CountedLoss(task.loss, train))
