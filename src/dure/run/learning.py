"""Whether the strategy can do what the task asks of it, beside learning at all.

See `dure.contracts.learning`: what a strategy cannot do is refused before anything is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from dure.contracts.learning import PARTS, Part, asked_of, check_unfrozen
from dure.contracts.strategy import Strategy, World
from dure.contracts.task import Task
from dure.tasks.parts import parts_of


def _asking(task: Task) -> list[Task]:
    """The task; of one that is made of parts, which differ in how they are trained, those too."""
    return [task, *(part for _, part in parts_of(task))]


def check_can(task: Task, strategy: Strategy, world: World) -> None:
    """Raises ValueError for the first thing asked that the strategy cannot do in this world."""
    for one in _asking(task):
        for part, value in asked_of(one).items():
            why = _unserved(part, strategy) if world.serves else None
            why = why or strategy.cannot(part, world.kind)
            if why is not None:
                raise ValueError(
                    f"{type(strategy).__name__} cannot train with {part}={value!r}: {why}; leave "
                    f"it out"
                )


def _unserved(part: Part, strategy: Strategy) -> str | None:
    """Why clients on a network cannot do it; None if they can (`dure.tasks.trained`)."""
    if strategy.trains_at_server:
        return "the sites of a network that train sides of one model do not compare it"
    if part == "compile":
        return "each site of a network compiles for itself: give it to a client's own task"
    return None


def check_learned(task: Task, model: nn.Module) -> None:
    """Raises ValueError for what the task asks of parameters that the model does not have."""
    check_unfrozen(task, model)


def learning_of(task: Task) -> dict[str, Any]:
    """What config.json says of it, as JSON: {} where nothing is asked."""
    return {str(name): value for name, value in asked_of(task).items()}


def with_learning(task: Task, asked: Mapping[str, Any]) -> Task:
    """The task as `learning_of` had it, where it was loaded anew. Raises ValueError for what is no
    setting.
    """
    # No other field of a task: config.json is data, which must not say where weights are read from.
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        raise ValueError(f"this dure knows no {unknown[0]!r} of a task's learning")
    return dataclasses.replace(task, **asked) if asked else task
