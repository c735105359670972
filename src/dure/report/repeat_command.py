"""Commands that repeat a run: its flags if they can express it, else its settings in words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from dure.report.document import source
from dure.report.html_fragments import world
from dure.report.json_values import mapping, number, text_of
from dure.report.runs import ReportedRun


def command(run: ReportedRun) -> str | None:
    """Return the shell command that repeats a run; None if flags cannot express its settings.

    A `command` in config.json is returned unchanged. Otherwise the run needs a named task, a
    strategy that can be found by name, and a world of processes, threads or simulated clients.
    Defaults are left out. A bool of a class or task of the user has no flag here, since the name of
    the flag depends on a default that is not known.
    """
    given = text_of(run.config.get("command"))
    if given is not None:
        return given
    task = mapping(run.config.get("task"))
    strategy = mapping(run.config.get("strategy"))
    # The name of a user's own strategy or world is its reference.
    system = strategy.get("from", strategy.get("name"))
    names = [text_of(task.get("name")), text_of(system)]
    place = _place(mapping(run.config.get("world")), strategy)
    if None in names or place is None:
        return None
    options = mapping(task.get("options"))
    try:
        words = [
            *_flags(_fields(strategy), defaults_of("systems", system), options),
            *_flags(options, defaults_of("tasks", names[0])),
            *_flags(_learning(task)),
            *_flags(_limits(run)),
            *place,
            *_flags({"seed": run.config.get("seed")}),
        ]
    except _NoFlag:
        return None
    return shlex.join(["dure", "train", *map(str, names), *words])


class _NoFlag(Exception):  # noqa: N818, it is no error
    """Raised for a value that no flag expresses."""


def _flags(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the words of the flags whose values differ from the defaults.

    Args:
        values: settings by name; without `defaults`, None is a flag that was not set.
        defaults: defaults by name; a setting without a default is always written.
        options: options of the task, whose names can be those of the axes of a mesh.

    Raises:
        _NoFlag: if no flag expresses a value.
    """
    words: list[str] = []
    for name, value in values.items():
        known = defaults or {}
        if (defaults is None and value is None) or (name in known and known[name] == value):
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            # A bool is a bare flag, which negates the default.
            if name not in known:
                raise _NoFlag
            words.append(flag if value else f"--no-{name.replace('_', '-')}")
        elif name == "mesh" and isinstance(value, dict):
            words += _mesh(value, options or {})
        else:
            words += [flag, *_texts(value)]
    return words


def _texts(value: object) -> list[str]:
    """Return the words behind a flag. Raises _NoFlag if there are none."""
    values = value if isinstance(value, list) else [value]
    if not values or any(isinstance(one, (bool, dict, list)) for one in values) or value == _LOST:
        raise _NoFlag
    return [setting_text(one) or "None" for one in values]


_LOST = "(no message)"
"""Text in config.json for a setting that was made in Python and has no text."""


def _mesh(degrees: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Return the flags of the axes with a degree above 1.

    The flags have a prefix if the task has an option of the same name.
    """
    prefix = "mesh." if set(MESH_AXES) & set(options) else ""
    known = {axis: number(degrees.get(axis)) for axis in MESH_AXES}
    return [
        word
        for axis, degree in known.items()
        if degree is not None and degree > 1
        for word in (f"--{prefix}{axis}", f"{degree:.0f}")
    ]


def _learning(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the task's learning options; None for a flag that was not set."""
    learning = dict(mapping(task.get("learning")))
    unfrozen = mapping(learning.pop("unfreeze", None))
    return {
        **learning,
        "unfreeze": [f"{name}={step}" for name, step in unfrozen.items()] or None,
        "validation": task.get("validation"),
        "weights": task.get("weights_from"),
    }


def _limits(run: ReportedRun) -> dict[str, Any]:
    """Return the flags of limits and evaluation; None for a flag that was not set."""
    stop = mapping(run.config.get("stop"))
    goals = [f"{metric}={goal}" for metric, goal in mapping(stop.get("target")).items()]
    return {
        **stop,
        "min_delta": stop.get("min_delta") or None,
        "target": goals or None,
        "evaluate_every": run.config.get("evaluate_every"),
    }


def _place(world: Mapping[str, Any], strategy: Mapping[str, Any]) -> list[str] | None:
    """Return the flags of the world; None for a world without flags.

    A system that counts its own ranks, or has one worker, has no flag for the number of workers.
    """
    name = text_of(world.get("name"))
    system = strategy.get("name")
    own = _fields(world)
    try:
        if "from" in world:
            reference = text_of(world["from"])
            return None if reference is None else ["--world", reference, *_flags(own, {})]
        if name == "processes":
            ranks = own.pop("ranks", None)
            counted = system in COUNTS_OWN_RANKS or (system == "single-worker" and ranks == 1)
            workers = {} if counted else {"workers": ranks}
            # Threads are the usual place of some systems that can be processes too.
            here = {"world": "processes"} if system == "hogwild" else {}
            return _flags(here | workers) + _flags(own, defaults_of("worlds", name))
        if name == "threads":
            devices = own.get("devices")
            named = isinstance(devices, list) and set(devices) != {"cpu"}
            given = {"world": None if system == "layers-per-core" else "threads"}
            given |= {"workers": own.get("threads"), "devices": devices if named else None}
            return _flags(given)
        if name == "simulated":
            here = {"world": "simulated"} if system in COUNTS_OWN_RANKS else {}
            return _flags(here) + _flags(own, defaults_of("worlds", name))
    except _NoFlag:
        return None
    return None


def _fields(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a strategy or world, without its name and the reference of its class."""
    return {key: value for key, value in encoded.items() if key not in ("name", "from")}


def settings(run: ReportedRun) -> str:
    """Return the strategy with its fields, and the world, in words."""
    strategy = mapping(run.config.get("strategy"))
    parts = [str(strategy.get("name", "strategy unknown"))]
    for key, value in _fields(strategy).items():
        parts.append(f"{key.replace('_', ' ')} {setting_text(value)}")
    return " · ".join([*parts, world(run)])


def setting_text(value: object) -> str | None:
    """Return a value of config.json as text; None for null."""
    if value is None:
        return None
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting_text(inner)}" for key, inner in value.items())
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value) if isinstance(value, (bool, list)) else str(value)


COUNTS_OWN_RANKS = ("parameter-server", "downpour")
"""Systems whose own settings determine the number of ranks."""

MESH_AXES = ("data", "pipeline", "tensor")
"""Axes of a mesh, each with a flag of its own."""


def defaults_of(kind: str, name: object) -> Mapping[str, Any]:
    """Return the default settings by name; empty for a class of the user.

    kind: "systems", "worlds" or "tasks".
    """
    found: Mapping[str, Any] = _all()[kind].get(str(name), {})
    return found


@cache
def _all() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(source(__file__, "default_settings.json"))
    return content
