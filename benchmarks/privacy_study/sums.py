"""What a round of secure aggregation costs, against clients, weights and how many are lost.

Clients and server are dure's state machines on one thread, without a network: figures are CPU
seconds and bytes (`benchmarks/privacy.py`, which compares them with the least that they could be).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from privacy import GRAPHS, Case, by_machines

JSON = dict[str, Any]

CLIENTS = (10, 30, 100)
WEIGHTS = (10_000, 100_000, 1_000_000)
LOST = (0.0, 0.05, 0.2)


def cases(quick: bool) -> Iterator[tuple[Case, int]]:
    """Each round, and how many weights it sums. Of few clients at least one is lost."""
    for members in CLIENTS[:2] if quick else CLIENTS:
        for weights in WEIGHTS[:1] if quick else WEIGHTS:
            for graph in GRAPHS:
                for share in LOST:
                    lost = max(1, round(share * members)) if share else 0
                    yield Case(members, graph, lost), weights


def sums(quick: bool, show: Callable[[str], None]) -> JSON:
    """A row for each round; the least of three of them."""
    rows = []
    for case, weights in cases(quick):
        context = case.context(weights)
        values = torch.linspace(-0.9, 0.9, weights)
        repeats = 1 if quick or case.members * weights >= 3e7 else 3
        runs = [by_machines(case, context, values) for _ in range(repeats)]
        row: JSON = {
            "graph": case.graph,
            "clients": case.members,
            "weights": weights,
            "lost": case.lost,
            "neighbours": context.degree,
            "threshold": context.threshold,
            **{name: min(run[name] for run in runs) for name in runs[0]},
        }
        rows.append(row)
        show(
            f"  {case.graph}, {case.members} x {weights:,}, {case.lost} lost: client "
            f"{row['client s']:.4f} s, server {row['server s']:.4f} s"
        )
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}
