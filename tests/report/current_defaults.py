"""Defaults of the systems, worlds and tasks of this dure, as default_settings.json has them.

python tests/report/current_defaults.py > src/dure/report/default_settings.json
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from dure import catalog
from dure.run.registry import encode, strategy_class
from dure.tasks.builtin import task_factory
from dure.worlds.processes.world import Processes
from dure.worlds.simulated import Simulated

PLACE = ("name", "ranks")
"""Entries of a world that are no settings of it."""


def current_defaults() -> dict[str, dict[str, dict[str, Any]]]:
    """The defaults by kind and name."""
    worlds = [Processes(2), Simulated()]
    return {
        "systems": {name: without(encode(strategy_class(name)())) for name in catalog.SYSTEMS},
        "worlds": {world.name: without(encode(world)) for world in worlds},
        "tasks": {name: options(name) for name in catalog.TASKS},
    }


def without(encoded: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in encoded.items() if key not in PLACE}


def options(task: str) -> dict[str, Any]:
    parameters = inspect.signature(task_factory(task)).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


if __name__ == "__main__":
    print(json.dumps(current_defaults(), indent=1))
