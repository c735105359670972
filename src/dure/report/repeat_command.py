"""Commands that repeat a run: its flags if they can express it, else its settings in words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from dure.report.html_fragments import world
from dure.report.json_values import mapping, text_of
from dure.report.runs import ReportedRun


def command(run: ReportedRun) -> str | None:
    """Return the shell command that repeats a run; None if flags cannot express its settings.

    A `command` in config.json is returned unchanged. Otherwise the run needs a named task, a
    strategy whose fields are numbers, words or null, and a world of processes or a simulated world.
    Defaults are left out.
    """
    given = text_of(run.config.get("command"))
    if given is not None:
        return given
    task = mapping(run.config.get("task"))
    strategy = mapping(run.config.get("strategy"))
    place = mapping(run.config.get("world"))
    # The name of a user's own strategy is its reference.
    system = strategy.get("from", strategy.get("name"))
    names = [text_of(task.get("name")), text_of(system)]
    workers = place.get("ranks" if place.get("name") == "processes" else "threads")
    # For a torchrun job, or a user's own world, the flags are not known here.
    if None in names or (workers is None and place.get("name") != "simulated"):
        return None
    flags = _fields(strategy)
    flags |= mapping(task.get("options"))
    flags |= _learning(task)
    # All fields and options, since the folder does not say which were set. Of limits and world,
    # only differences from the defaults.
    flags |= {key: value for key, value in _asked(run, workers).items() if value is not None}
    words = ["dure", "train", *map(str, names)]
    for key, value in flags.items():
        values = value if isinstance(value, list) else [value]
        # A bool is a bare flag whose name depends on the default, which is not known here.
        if any(isinstance(one, (bool, dict, list)) for one in values):
            return None
        words += [f"--{key.replace('_', '-')}", *(setting_text(one) or "None" for one in values)]
    return shlex.join(words)


def _learning(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the task's learning options."""
    learning = dict(mapping(task.get("learning")))
    unfrozen = mapping(learning.pop("unfreeze", None))
    told = {
        **learning,
        "unfreeze": [f"{name}={step}" for name, step in unfrozen.items()] or None,
        "validation": task.get("validation"),
        "weights": task.get("weights_from"),
    }
    return {name: value for name, value in told.items() if value is not None}


def _asked(run: ReportedRun, workers: object) -> dict[str, Any]:
    """Return the flags of limits, world, seed and evaluation; None for a flag that was not set."""
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
"""Defaults of worlds, in the form of config.json.

The report works without torch, and so without the classes of the worlds.
"""


def _conditions(place: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a processes or simulated world that differ from the defaults."""
    usual = USUAL.get(str(place.get("name")), {})
    return {
        name: place[name]
        for name, value in usual.items()
        # Compared as texts: numbers, words and null alike.
        if name in place and str(place[name]) != value
    }


def _of_threads(place: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a world of threads; `world` is harmless if it is the default."""
    if place.get("name") != "threads":
        return {}
    devices = place.get("devices")
    named = isinstance(devices, list) and set(devices) != {"cpu"}
    return {"world": "threads", "devices": devices if named else None}


def _fields(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a strategy, without its name and the reference of its class."""
    return {key: value for key, value in strategy.items() if key not in ("name", "from")}


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
