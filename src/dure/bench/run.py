"""`dure bench all-reduce`: the contest for every number of ranks, and its progress."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console

from dure.bench.contest import Contest
from dure.bench.plan import BenchPlan, size_text
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


class BenchProgress:
    """Shows events of the contest. quiet: show nothing."""

    def __init__(self, plan: BenchPlan, quiet: bool = False) -> None:
        self.plan = plan
        self.quiet = quiet
        console = Console(stderr=True)
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.percentage:>3.0f}%"),
            progress.TextColumn("{task.fields[what]}"),
            progress.TimeElapsedColumn(),
            console=console,
            # The bar disappears at the end, when the table follows.
            transient=True,
        )
        self.live = console.is_terminal and not quiet
        self.task = self.bar.add_task(
            "all-reduce", total=float(len(plan.ranks) * len(plan.sizes)), what=""
        )
        self._said: tuple[int, int] | None = None

    def __enter__(self) -> BenchProgress:
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        try:
            self._show(event)
        except OSError:  # the terminal or the reader is gone; the benchmark goes on
            self.live = False
            self.quiet = True

    def _show(self, event: dict[str, Any]) -> None:
        place = f"{event['ranks']} ranks, {size_text(event['bytes'])}"
        if self.live:
            # Finished sizes, including all of fewer ranks, and a part of this size.
            done = (
                self.plan.ranks.index(event["ranks"]) * len(self.plan.sizes)
                + event["step"]
                + event["share"]
            )
            self.bar.update(self.task, completed=done, what=f"{place}: {event['what']}")
        elif not self.quiet and self._said != (event["ranks"], event["bytes"]):
            self._said = (event["ranks"], event["bytes"])
            print(f"all-reduce: {place}", file=sys.stderr, flush=True)
