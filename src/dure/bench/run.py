"""`dure bench all-reduce`: the contest for every number of ranks, and its result."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from dure.bench.contest import Contest
from dure.bench.plan import BenchPlan
from dure.bench.result import BenchResult
from dure.contracts.world import RankContext
from dure.machine.cores import available_cores
from dure.worlds.processes.fork_server import server
from dure.worlds.processes.world import Processes

DEADLINE = 600.0
"""Timeout in seconds of a rank for another rank.

A large all-reduce through a master takes long on a small machine.
"""


def machine() -> dict[str, Any]:
    """Return the machine's relevant properties: processor, cores, memory (bytes), kernel."""
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
    """Return the name of the processor in Linux; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    # A line for each core; the first is enough.
    named = (line for line in lines if line.startswith("model name"))
    return next(named, "").partition(":")[2].strip()


def versions() -> dict[str, str]:
    """Return the versions of the installed contenders and of Python."""
    found = {"python": platform.python_version()}
    for name in ("dure", "torch", "numpy", "mpi4py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def program(plan: BenchPlan) -> Callable[[RankContext], dict[str, Any]]:
    """Return the program of every rank."""
    # A closure: the world pickles it by value for its ranks.
    return lambda place: Contest(plan, place).run()


def run(
    plan: BenchPlan, on_progress: Callable[[dict[str, Any]], None] = lambda event: None
) -> BenchResult:
    """Measure all of `plan`. Raises DureError if a rank fails, or for a wrong sum."""
    result = BenchResult(machine(), versions(), plan)
    # Started before, so that the first world is not charged for the start of the server.
    server.ready()
    for ranks in plan.ranks:
        measured = Processes(ranks, deadline=DEADLINE).run(program(plan), on_progress)
        result.add(measured)
        if result.interrupted:
            break
    return result
