"""Defaults of dure's own systems, worlds and tasks, in the form of config.json.

The report works without torch, and so without the classes themselves. default_settings.json is
what `dure.run.registry.encode` writes of a system with its defaults; tests/report compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from dure.report.document import source

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
