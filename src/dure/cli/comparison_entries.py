"""Systems of a comparison on the command line, with settings and task options of their own.

    dure compare digits single-worker,lr=0.01 data-parallel,batch_size=32,lr=0.3 --model cnn

A setting behind a system's name is a field of the system or of its world; any other is an option of
the task, for this system alone. It takes precedence over the same flag.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from dure.cli.flags import given_options, options_of_task, parse_flags
from dure.cli.worlds import entry, settings_of
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.parallel.mesh.mesh import AXES
from dure.run.registry import split_settings
from dure.tasks.builtin import load_task


def without_options(system: str, reference: str) -> tuple[str, dict[str, str]]:
    """Return (the system with its own settings, the options of the task as texts)."""
    name, *settings = split_settings(system)
    options = {field.name for field in dataclasses.fields(options_of_task(reference))}
    theirs = {"world", "workers", *settings_of(system)}
    # parallel,data=2 is a degree of its mesh, whatever options a task has.
    theirs |= set(AXES) if "mesh" in theirs else set()
    of_task = options - theirs
    own = [text for text in settings if text.partition("=")[0] not in of_task]
    rest = [text.partition("=") for text in settings if text not in own]
    return ",".join([name, *own]), {option: value for option, _, value in rest}


class ComparisonEntries:
    """The systems of a comparison. Systems with the same options share a task, and its model.

    settled: function that applies the comparison's common settings to a task: learning options and
    initial weights.
    """

    def __init__(
        self, reference: str, options: Mapping[str, Any], settled: Callable[[Task], Task]
    ) -> None:
        self.reference = reference
        self.options = options
        self._settled = settled
        self._tasks: dict[str, Task] = {}

    def task(self, own: Mapping[str, str] | None = None) -> Task:
        """Return the task with a system's own options. Raises ValueError for invalid options."""
        texts = dict(own or {})
        key = json.dumps(texts, sort_keys=True)
        if key not in self._tasks:
            common = {name: value for name, value in self.options.items() if name not in texts}
            options = {**common, **_read(self.reference, texts)}
            self._tasks[key] = self._settled(load_task(self.reference, **options))
        return self._tasks[key]

    def entry(
        self, system: str, options: Mapping[str, str], workers: int | None
    ) -> tuple[Strategy, World, Task]:
        """Return a system, its world, and its task with these options.

        Raises ValueError for invalid settings or options.
        """
        return *entry(system, workers), self.task(options)


def _read(reference: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse options of a task from their texts, in the same way as flags."""
    kind = options_of_task(reference)
    hints = {field.name: field for field in dataclasses.fields(kind)}
    flags: list[str] = []
    read: dict[str, Any] = {}
    for name, value in texts.items():
        # A bool is a flag without a value, which negates its default.
        if isinstance(hints[name].default, bool):
            read[name] = _truth(name, value)
        else:
            flags += ["--" + name.replace("_", "-"), value]
    parsed = parse_flags(f"dure train {reference} SYSTEM", {"task": kind}, flags)["task"]
    given = given_options(parsed)
    return read | {name: given[name] for name in texts if name in given and name not in read}


def _truth(name: str, value: str) -> bool:
    words = {"true": True, "false": False}
    if value.lower() not in words:
        raise ValueError(f"{name} is {value!r}, but it has to be true or false")
    return words[value.lower()]
