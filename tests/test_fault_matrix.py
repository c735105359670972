"""A small part of the matrix of faults: benchmarks/fault_matrix.py has all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "fault_matrix.py"
A_PART = (
    "^processes, dure loss hang",
    "^ZeRO 3 optimizer kill",
    "^one process metric raise",
    "^batched loss raise",
    "^loop-processes (backward:1 stop|data kill)",
)
RUNS = 6


def test_faults_of_every_kind_end_by_the_name_of_rank_or_client_and_the_step(
    tmp_path: Path,
) -> None:
    into = tmp_path / "matrix.json"
    asked = ["--only", "|".join(A_PART), "--deadline", "4", "--into", into]
    done = subprocess.run(
        [sys.executable, SCRIPT, *asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [run["ok"] for run in json.loads(into.read_text())["runs"]] == [True] * RUNS, done.stderr
