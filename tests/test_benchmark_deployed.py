"""The clients of benchmarks/deployment.py are clients of today's dure: a part of it runs here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "deployment.py"


def test_rounds_are_measured_with_whole_clients_and_with_light_ones(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    quick = ["--quick", "--only", "rounds", "--folder", tmp_path, "--into", result]
    done = subprocess.run(
        [sys.executable, SCRIPT, *quick], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rounds"]["rows"]["2 x 0.8 MB"]
    assert set(rows) == {"dure, disk", "dure, memory, light clients"}, done.stderr
    assert all(row["seconds"]["median"] > 0 for row in rows.values())
