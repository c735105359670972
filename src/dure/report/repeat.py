"""How to do a run again: the command where it can be said in flags, else its settings in words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from dure.report.parts import world
from dure.report.runs import Run
from dure.report.values import mapping, text_of


def command(run: Run) -> str | None:
    """The shell command that repeats a run; None where no flags can say its configuration.

    A `command` in config.json is taken as it stands. Else: a named task, a strategy whose fields
    are numbers, words or null, and a world of processes or a simulated one. What was not set is
    left to its default.
    """
    given = text_of(run.config.get("command"))
    if given is not None:
        return given
    task = mapping(run.config.get("task"))
    strategy = mapping(run.config.get("strategy"))
    place = mapping(run.config.get("world"))
    # A strategy of a user's own is named by where it is found.
    system = strategy.get("from", strategy.get("name"))
    names = [text_of(task.get("name")), text_of(system)]
    workers = place.get("ranks" if place.get("name") == "processes" else "threads")
    # A torchrun job, or a world of a user's own: which flags start it is not known here.
    if None in names or (workers is None and place.get("name") != "simulated"):
        return None
    flags = _fields(strategy)
    flags |= mapping(task.get("options"))
    flags |= _learning(task)
    # All fields and options: the folder does not say which of them were set. Of limits and world
    # only what differs from what is usual.
    flags |= {key: value for key, value in _asked(run, workers).items() if value is not None}
    words = ["dure", "train", *map(str, names)]
    for key, value in flags.items():
        values = value if isinstance(value, list) else [value]
        # A bool would be a bare flag, which one depends on a default that is not known here.
        if any(isinstance(one, (bool, dict, list)) for one in values):
            return None
        words += [f"--{key.replace('_', '-')}", *(plain(one) or "None" for one in values)]
    return shlex.join(words)


def _learning(task: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of how the task is trained, as far as that was asked for."""
    learning = dict(mapping(task.get("learning")))
    unfrozen = mapping(learning.pop("unfreeze", None))
    told = {
        **learning,
        "unfreeze": [f"{name}={step}" for name, step in unfrozen.items()] or None,
        "validation": task.get("validation"),
        "weights": task.get("weights_from"),
    }
    return {name: value for name, value in told.items() if value is not None}


def _asked(run: Run, workers: object) -> dict[str, Any]:
    """The flags of limits, world, seed and evaluation; what was not asked for is None."""
    place = mapping(run.config.get("world"))
    stop = mapping(run.config.get("stop"))
    goals = [f"{metric}={goal}" for metric, goal in mapping(stop.get("target")).items()]
    return {
        **stop,
        "min_delta": stop.get("min_delta") or None,
        "workers": workers,
        **_of_threads(place),
        **_conditions(place),
        "seed": run.config.get("seed"),
        "evaluate_every": run.config.get("evaluate_every"),
        "target": goals or None,
    }


USUAL = {
    "processes": {"deadline": "60.0", "backend": "dure"},
    "simulated": {
        "devices": "equal:100.0",
        "availability": "always",
        "arrival": "still",
        "drop_out": "0.0",
        "attack": "none",
        "attackers": "0.0",
        "attackers_change": "False",
        "engine": "auto",
        "processes": "None",
        "server_mbit": "inf",
        "server_examples_per_second": "inf",
        "energy": "none",
        "transfer_budget": "None",
        "keep_updates": "0",
        "deadline": "60.0",
    },
}
"""What worlds are where nothing is said, as config.json has it.

A report does without torch, and so without the worlds themselves.
"""


def _conditions(place: Mapping[str, Any]) -> dict[str, Any]:
    """What was set of a world of processes or a simulated one."""
    usual = USUAL.get(str(place.get("name")), {})
    return {
        name: place[name]
        for name, value in usual.items()
        # Compared as texts: numbers, words and null alike.
        if name in place and str(place[name]) != value
    }


def _of_threads(place: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a world of threads; `world` does no harm where it goes without saying."""
    if place.get("name") != "threads":
        return {}
    devices = place.get("devices")
    named = isinstance(devices, list) and set(devices) != {"cpu"}
    return {"world": "threads", "devices": devices if named else None}


def _fields(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """What was set of a strategy: all but its name, and where one of a user's own is found."""
    return {key: value for key, value in strategy.items() if key not in ("name", "from")}


def settings(run: Run) -> str:
    """The strategy with its fields, and the world, in words."""
    strategy = mapping(run.config.get("strategy"))
    parts = [str(strategy.get("name", "strategy unknown"))]
    for key, value in _fields(strategy).items():
        parts.append(f"{key.replace('_', ' ')} {plain(value)}")
    return " · ".join([*parts, world(run)])


def plain(value: object) -> str | None:
    """A value of config.json as text; None for null."""
    if value is None:
        return None
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(inner)}" for key, inner in value.items())
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value) if isinstance(value, (bool, list)) else str(value)
