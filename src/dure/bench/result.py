"""The result of a benchmark: measurements, and values derived from them.

As JSON (schema 1):

    benchmark     "all_reduce"
    machine       processor, cores, memory (bytes), system
    versions      of dure, torch, numpy, python, and of the peers that took part
    settings      sizes, ranks, repeats, batch, longest: the fields of `BenchPlan`
    contenders    name, label, kind (peer, algorithm, backend, floor), what;
                  `absent` is the reason for a missing contender
    interrupted   whether Ctrl-C ended it early
    cells         for each contender, number of ranks and size:
      contender, ranks, bytes    bytes of the tensor of each rank
      calls, samples             calls in a batch; of each batch, seconds a call (slowest rank)
      seconds, low, high         median and quartiles of the samples
      algorithm_bandwidth        bytes / seconds
      bus_bandwidth              the same times 2(N-1)/N, as in nccl-tests: ranks compare
      cpu_seconds                CPU time of all ranks together, a call
      floor_share                the memory's time for the same bytes / seconds
      to_gloo, to_open_mpi       times faster than the peer
      skipped, guess             true if a call would take too long, and its least seconds
    calibration   with --fit: see fit.py
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from dure.bench.plan import CONTENDERS, BenchPlan, Contender

JSON = dict[str, Any]


@dataclass
class BenchResult:
    """Measurements of a benchmark so far."""

    machine: JSON
    versions: dict[str, str]
    plan: BenchPlan
    cells: list[JSON] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    calibration: JSON | None = None

    @property
    def contenders(self) -> list[Contender]:
        """All requested contenders, including absent ones."""
        return [CONTENDERS[name] for name in self.plan.contenders]

    def add(self, measured: JSON) -> None:
        """Add the measurements of a world of ranks."""
        self.absent.update(measured["absent"])
        self.versions.update(measured["versions"])
        # Cells of this number of ranks, with which the others are compared.
        found = {
            (cell["contender"], cell["bytes"]): cell
            for cell in measured["cells"]
            if not cell.get("skipped")
        }
        for cell in measured["cells"]:
            self.cells.append(cell if cell.get("skipped") else {**cell, **_derived(cell, found)})
        self.interrupted = self.interrupted or measured["interrupted"]

    def cell(self, contender: str, ranks: int, nbytes: int) -> JSON | None:
        """Return a measured cell; None if it was skipped or the contender is absent."""
        for cell in self.cells:
            if (cell["contender"], cell["ranks"], cell["bytes"]) == (contender, ranks, nbytes):
                return None if cell.get("skipped") else cell
        return None

    def as_json(self) -> JSON:
        """Return the whole result, by the schema above."""
        contenders = []
        for contender in self.contenders:
            absent = (
                {"absent": self.absent[contender.name]} if contender.name in self.absent else {}
            )
            contenders.append({**contender.as_json(), **absent})
        settings = {
            key: value
            for key, value in dataclasses.asdict(self.plan).items()
            if key != "contenders"
        }
        calibration = {"calibration": self.calibration} if self.calibration is not None else {}
        return {
            "benchmark": "all_reduce",
            "schema": 1,
            "machine": self.machine,
            "versions": self.versions,
            "settings": settings,
            "contenders": contenders,
            "interrupted": self.interrupted,
            "cells": self.cells,
            **calibration,
        }


def _derived(cell: JSON, found: dict[tuple[str, int], JSON]) -> JSON:
    """Return the values derived from a cell and the peers' cells at the same size."""
    ranks = cell["ranks"]
    nbytes = cell["bytes"]
    # A time for each batch, already divided by its calls.
    samples = cell["samples"]
    seconds = median(samples)
    # A single sample has no quartiles, so it serves as all three.
    low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    result = {
        "low": low,
        "high": high,
        "algorithm_bandwidth": nbytes / seconds,
        "bus_bandwidth": nbytes / seconds * 2 * (ranks - 1) / ranks,
    }
    for key, peer in (("floor_share", "memory"), ("to_gloo", "gloo"), ("to_open_mpi", "open-mpi")):
        other = found.get((peer, nbytes))
        # All three are the other's seconds over these: the share of the floor is at most about 1,
        # and times faster than a peer above 1. The floor has no share of itself.
        if other is not None and (peer, cell["contender"]) != ("memory", "memory"):
            result[key] = other["seconds"] / seconds
    return result
