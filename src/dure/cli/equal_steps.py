"""Equal optimizer steps for the systems of `dure compare`.

By default systems have the batch sizes of their papers: joint batches of 64, batches of 10 of each
client, or all data. The accuracy of systems with such different steps cannot be compared after the
same number of passes, because a system with smaller batches makes more steps. `dure compare`
therefore sets the batch size of every system whose settings do not name a `batch_size`: an
optimizer step takes `STEP` examples, whether all workers make the step together, or each worker or
client makes a step of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.run.registry import split_settings

STEP = 32
"""Examples of an optimizer step."""

ComparedSystem = tuple[Strategy, World, Task]


def with_equal_steps(
    texts: Sequence[str], systems: Sequence[ComparedSystem]
) -> tuple[list[ComparedSystem], list[str]]:
    """Return the systems with steps of `STEP` examples, and a sentence for each other step.

    texts: the systems as on the command line, with their settings.
    """
    equal: list[ComparedSystem] = []
    notes: dict[str, None] = {}
    for text, (strategy, world, task) in zip(texts, systems, strict=True):
        if not _names_batch_size(text):
            strategy, note = _with_equal_step(strategy, task, world.workers)
            notes |= {} if note is None else {note: None}
        equal.append((strategy, world, task))
    return equal, list(notes)


def _names_batch_size(text: str) -> bool:
    return any(setting.partition("=")[0] == "batch_size" for setting in split_settings(text)[1:])


def _with_equal_step(
    strategy: Strategy, task: Task, workers: int | None
) -> tuple[Strategy, str | None]:
    """Return the strategy with its batch size, and a sentence if its step differs from `STEP`."""
    if all(field.name != "batch_size" for field in fields(strategy)):  # type: ignore[arg-type]
        return strategy, None
    batches = strategy.batches_of_step(task, workers)
    if batches is None:
        return strategy, (
            f"{strategy.name} makes each step on all data: in the same passes it makes fewer steps "
            f"than systems with steps of {STEP} examples"
        )
    size = max(1, round(STEP / batches))
    changed: Strategy = replace(strategy, batch_size=size)  # type: ignore[type-var]
    step = size * batches
    if step == STEP:
        return changed, None
    return changed, (
        f"{strategy.name} makes steps of {step} examples, {size} of each of {batches} clients, "
        f"because {STEP} examples cannot be divided evenly"
    )
