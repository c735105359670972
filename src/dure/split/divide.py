"""Which of the two ways to divide a model is a task's."""

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
    """The model divided: by its files where it has two, else cut there.

    examples: of a client's batch. Raises ValueError for a model that cannot be divided so.
    """
    if isinstance(task, JoinedTask) and isinstance(model, ModelParts):
        return Apart(task, model, train, examples, seed)
    return Cut(task, model, at, examples, seed, CountedLoss(task.loss, train))
