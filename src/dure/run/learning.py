"""Check that a strategy supports the learning options of a task.

See `dure.contracts.training_options`. An option that the strategy does not support is refused
before training starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from dure.contracts.adapter import LoRA
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.training_options import PARTS, Part, check_unfrozen, training_options_of
from dure.contracts.world import World
from dure.tasks.loss_scaling import check_weights
from dure.tasks.parts import parts_of


def _asking(task: Task) -> list[Task]:
    """Return the task and its parts, which may differ in their learning options."""
    return [task, *(part for _, part in parts_of(task))]


def check_can(task: Task, strategy: Strategy, world: World) -> None:
    """Raise ValueError for the first learning option that the strategy does not support here."""
    for one in _asking(task):
        _check_ranks(one.adapter, world)
        for part, value in training_options_of(one).items():
            why = _unserved(part, strategy) if world.serves else None
            why = why or strategy.cannot(part, world.kind)
            if why is not None:
                raise ValueError(
                    f"{type(strategy).__name__} cannot train with {part}={value!r}: {why}; leave "
                    f"it out"
                )


def _check_ranks(adapter: LoRA | None, world: World) -> None:
    """Raise ValueError for ranks of clients in a world without clients."""
    if adapter is not None and adapter.has_unlike_ranks and world.kind != "clients":
        raise ValueError(
            f"LoRA(rank={adapter.rank}) has a rank for each client of a federation: give one rank"
        )


def _unserved(part: Part, strategy: Strategy) -> str | None:
    """Return why clients on a network cannot honour the option; None if they can.

    See `dure.tasks.task_summary`.
    """
    if strategy.traits.trains_at_server:
        return "sites that train parts of one model over a network do not compare it"
    if part == "compile":
        return "each site of a network compiles its own model: set it in the client's task"
    return None


def check_learned(task: Task, model: nn.Module) -> None:
    """Check that the model has the parameters that the learning options of the task need.

    Raises ValueError for an unknown name, and for weights that loss scaling cannot protect.
    """
    check_unfrozen(task, model)
    if task.precision == "fp16":
        check_weights(model)


def learning_of(task: Task) -> dict[str, Any]:
    """Return the learning options of the task for config.json; {} if the task sets none."""
    return {str(name): value for name, value in training_options_of(task).items()}


def with_learning(task: Task, asked: Mapping[str, Any]) -> Task:
    """Return a task that was loaded again, with the learning options of its config.json.

    Raises ValueError for a name that is no learning option.
    """
    # Only learning options: config.json is data, and data must not name files to read weights from.
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        raise ValueError(f"this version of dure does not know the training option {unknown[0]!r}")
    return dataclasses.replace(task, **asked) if asked else task
