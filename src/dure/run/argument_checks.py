"""Check the arguments of `dure.train` and its relatives before anything is done with them.

A name in place of an object, a class in place of an instance, or a number in place of a limit each
raises an error that says what to write instead.
"""

from __future__ import annotations

import math
from typing import Any

from dure import catalog
from dure.arguments import check_fields, shown
from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.errors import suggestion


def check_run_arguments(
    task: Any,
    stop: Any,
    *,
    seed: Any = 0,
    evaluate_every: Any = None,
    checkpoint_every: Any = None,
    label: Any = None,
) -> None:
    """Raise ValueError for arguments of a run that have the wrong type."""
    check_task(task)
    check_stop(stop)
    if not _is_whole(seed):
        raise ValueError(f"seed is {shown(seed)}, but it has to be an integer")
    for name, every in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and not _is_whole(every):
            raise ValueError(f"{name} is {shown(every)}, but it has to be an integer or None")
    if label is not None and not isinstance(label, str):
        raise ValueError(f"label is {shown(label)}, but it has to be a str or None")


def check_task(task: Any) -> None:
    """Raise ValueError if `task` is no `dure.Task`."""
    if isinstance(task, Task):
        return
    if isinstance(task, str):
        raise ValueError(
            f"the task is the str {task!r}: give dure.load_task({task!r}), which loads it"
        )
    raise ValueError(f"the task is {shown(task)}, but it has to be a dure.Task")


def check_stop(stop: Any) -> None:
    """Raise ValueError if `stop` is no `dure.Stop`, or has limits that are no numbers."""
    if stop is None:
        return
    if not isinstance(stop, Stop):
        raise ValueError(
            f"stop is {shown(stop)}: give dure.Stop, such as dure.Stop(epochs=2) or "
            f"dure.Stop(steps=100)"
        )
    # A run without limits is valid: its user ends it.
    check_fields(stop, limited=False)


def check_function(name: str, function: Any) -> None:
    """Raise ValueError if the argument called `name` is not callable."""
    if not callable(function):
        raise ValueError(f"{name} is {shown(function)}, but it has to be a function")


def check_peak_flops(peak: Any) -> None:
    """Raise ValueError for operations per second that are no number above 0."""
    number = isinstance(peak, (int, float)) and not isinstance(peak, bool)
    if peak is not None and not (number and 0 < peak < math.inf):
        raise ValueError(
            f"peak_flops is {shown(peak)}, but it has to be a number above 0, such as 989e12"
        )


def missing_instance_hint(thing: Any, what: str) -> str | None:
    """Return the object to write in place of a name or a class; None for any other value.

    what: "Strategy" or "World".
    """
    known: Any = catalog.SYSTEMS if what == "Strategy" else catalog.WORLDS
    if isinstance(thing, str):
        name = thing.partition(":")[0].partition(",")[0]
        if name not in known:
            return f"there is no {what.lower()} {thing!r}{suggestion(name, known)}"
        kind = known[name].kind
        return f"the {what.lower()} is the str {thing!r}: give dure.{kind}()"
    if isinstance(thing, type):
        return f"{thing.__name__} is a class: give an instance, {thing.__name__}(...)"
    if what == "World" and isinstance(thing, int):
        return f"the world is {thing}: give dure.Processes({thing}) or dure.Threads({thing})"
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
