"""The most memory that a rank takes from its start to its last step, against the formula.

    base + weights + gradients + optimizer state + activations       of its part of the model

base is what a rank takes that trains next to nothing by the same system, measured beside it. The
ranks' memory (Pss in /proc: pages of mapped files count, and what ranks share counts once, divided
over those that have it: ZeRO's parameters lie in memory that all ranks read) is read fifty times a
second by this process. Phases are told apart: "start" until the first step is done,
"training" until the run's limit is reached, "end" while the result goes to the user.

    python benchmarks/part_memory.py [--megabytes 400] [--optimizer sgd|adam]
        --page docs/larger-than-memory.md --result benchmarks/results/part_memory.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from pages import fill, table
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.strategy import Strategy
from dure.parallel.mesh.mesh import Mesh

WIDTH = 1024
EXAMPLES = 16
STEPS = 3
COPIES = {"sgd": 2, "adam": 4}
"""Weights and gradients, and what an optimizer adds."""

PLAN = "*.up=Column(); *.down=Row()"
SYSTEMS: dict[str, tuple[Strategy, int]] = {
    "tensor 2": (dure.TensorParallel(batch_size=EXAMPLES, plan=PLAN), 2),
    "pipeline 2": (dure.Pipeline(batch_size=EXAMPLES, microbatches=2), 2),
    "zero 3 x 2": (dure.ZeRO(stage=3, batch_size=EXAMPLES), 2),
    "mesh 1x2x2": (
        dure.Parallel(
            mesh=Mesh(pipeline=2, tensor=2), batch_size=EXAMPLES, microbatches=2, plan=PLAN
        ),
        4,
    ),
}
"""(strategy, ranks): each rank holds one part of as many."""


class Block(nn.Module):
    """Two layers, 8·WIDTH² parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return found


class Make:
    """A model of so many blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def __call__(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, WIDTH), *(Block() for _ in range(self.blocks)), nn.Linear(WIDTH, 4)
        )


def train(system: str, blocks: int, optimizer: str, phase: Path) -> None:
    """One run, in this process and its ranks; the phase is written into a file."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 16, generator=generator)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    task = dure.Task(
        model=Make(blocks),
        loss=F.cross_entropy,
        train=(inputs, torch.arange(EXAMPLES) % 4),
        optimizer=lambda parameters: kinds[optimizer](parameters, lr=1e-4),
    )
    strategy, ranks = SYSTEMS[system]

    told = notes(phase, STEPS)
    dure.train(task, strategy, dure.Processes(ranks), dure.Stop(steps=STEPS), on_progress=told)


def notes(phase: Path, steps: int) -> Callable[[dict[str, Any]], None]:
    """Writes into a file in which phase a run of so many steps is."""

    def told(event: dict[str, Any]) -> None:
        step = event["step"]
        phase.write_text("start" if step < 1 else "training" if step < steps else "end")

    return told


def children(pid: int) -> list[int]:
    """The processes that one has started; none of one that is gone."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def resident(pid: int) -> int:
    """Bytes of a process in memory; 0 of one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
    return found[0] if found else 0


def watched(*command: str, **variables: str) -> dict[str, dict[str, int]]:
    """By phase: the most memory of any rank, and of the process that started them.

    command: a program of Python, to which the file for the phase is given as well. Ranks are
    children of a process that has torch loaded, and trains nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        phase = Path(folder, "phase")
        phase.write_text("start")
        environment = {**os.environ, **variables}
        process = subprocess.Popen([sys.executable, *command, str(phase)], env=environment)
        most: dict[str, dict[str, int]] = {}
        while process.poll() is None:
            now = most.setdefault(phase.read_text() or "start", {"rank": 0, "parent": 0})
            now["parent"] = max(now["parent"], resident(process.pid))
            ranks = [rank for one in children(process.pid) for rank in children(one)]
            now["rank"] = max([now["rank"], *map(resident, ranks)])
            time.sleep(0.02)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed")
    return most


def compared(system: str, megabytes: int, optimizer: str) -> dict[str, Any]:
    """What a system's ranks take, beside the formula."""
    blocks = max(1, round(megabytes * 1e6 / (4 * 8 * WIDTH * WIDTH)))
    small, found = (
        watched(__file__, "--only", system, str(count), optimizer) for count in (1, blocks)
    )
    _, ranks = SYSTEMS[system]
    nbytes = sum(one.nbytes for one in Make(blocks)().parameters())
    share = COPIES[optimizer] * nbytes / ranks
    one = COPIES[optimizer] * sum(one.nbytes for one in Make(1)().parameters()) / ranks
    base = small["training"]["rank"] - one
    formula = base + share
    peak = max(found[phase]["rank"] for phase in ("start", "training"))
    return {
        "system": system,
        "ranks": ranks,
        "weights_mb": nbytes / 1e6,
        "base_mb": base / 1e6,
        "formula_mb": formula / 1e6,
        "peak_mb": peak / 1e6,
        "peak_over_formula": peak / formula,
        "phases_mb": {
            phase: {who: most / 1e6 for who, most in one.items()} for phase, one in found.items()
        },
    }


NAMES = {
    "tensor 2": "tensor parallel, 2",
    "pipeline 2": "pipeline, 2",
    "zero 3 x 2": "ZeRO 3 x 2",
    "mesh 1x2x2": "pipeline 2 x tensor 2",
}
"""Names of the systems on the page."""


def cells(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    head = [
        "system",
        "base, MB",
        "formula, MB",
        "peak until the last step, MB",
        "over the formula",
    ]
    lines = [
        [
            NAMES[row["system"]],
            f"{row['base_mb']:.0f}",
            f"{row['formula_mb']:.0f}",
            f"{row['peak_mb']:.0f}",
            f"{row['peak_over_formula']:.2f}",
        ]
        for row in rows
    ]
    return table(head, lines)


def main() -> None:
    """Compare all systems."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="of weights")
    parser.add_argument("--optimizer", choices=list(COPIES), default="sgd")
    parser.add_argument("--systems", nargs="*", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--only", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    takes_result(parser)
    asked = parser.parse_args()
    if asked.only:
        system, blocks, optimizer, phase = asked.only
        train(system, int(blocks), optimizer, Path(phase))
        return
    rows = [compared(system, asked.megabytes, asked.optimizer) for system in asked.systems]
    if asked.page is not None:
        fill(asked.page, {"part memory": cells(rows)})
    give({"optimizer": asked.optimizer, "rows": rows}, asked.result, indent=1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
