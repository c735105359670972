"""`dure bench all-reduce`: the contest for every number of ranks, and its result."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from dure.bench.contest import Contest
from dure.bench.plan import Plan
from dure.bench.result import Result
from dure.contracts.strategy import Place
from dure.machine.cores import available_cores
from dure.worlds.processes.fork_server import server
from dure.worlds.processes.world import Processes

DEADLINE = 600.0
"""Seconds that a rank waits for another.

A large all-reduce through a master takes long on a small machine.
"""


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory (bytes), kernel."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        memory = 0
    return {
        "processor": _processor() or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "memory": memory,
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    """What Linux calls it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    # A line for each core; the first will do.
    named = (line for line in lines if line.startswith("model name"))
    return next(named, "").partition(":")[2].strip()


def versions() -> dict[str, str]:
    """Of what takes part, where it is installed."""
    found = {"python": platform.python_version()}
    for name in ("dure", "torch", "numpy", "mpi4py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def program(plan: Plan) -> Callable[[Place], dict[str, Any]]:
    """What every rank runs."""
    # A closure: the world pickles it by value for its ranks.
    return lambda place: Contest(plan, place).run()


def run(plan: Plan, on_progress: Callable[[dict[str, Any]], None] = lambda event: None) -> Result:
    """Measures all of `plan`. Raises DureError if a rank fails, a wrong sum included."""
    result = Result(machine(), versions(), plan)
    # The first world would be charged for the start of the server.
    server.ready()
    for ranks in plan.ranks:
        measured = Processes(ranks, deadline=DEADLINE).run(program(plan), on_progress)
        result.add(measured)
        if result.interrupted:
            break
    return result
