"""A model whose undivided step needs 1.6 times the memory that a process may have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from limited import can_limit, limit
from wide import STEP

ROOM = STEP * 10 // 16


def trained(system: str, group: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("wide.py")
    command = [sys.executable, str(script), system, group, str(folder / system)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not can_limit(), reason="limits of memory take root and cgroups")
def test_divided_it_trains_as_undivided_without_the_limit(tmp_path: Path) -> None:
    assert trained("single", "-", tmp_path).returncode == 0
    right = torch.load(tmp_path / "single.pt")
    for system in ("tensor", "pipeline", "zero", "mesh"):
        with limit(ROOM) as group:
            done = trained(system, str(group), tmp_path)
            assert done.returncode == 0, (system, done.stderr[-2000:])
        found = torch.load(tmp_path / f"{system}.pt")
        assert found.keys() == right.keys()
        for name, one in right.items():
            torch.testing.assert_close(found[name], one, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not can_limit(), reason="limits of memory take root and cgroups")
def test_undivided_it_does_not(tmp_path: Path) -> None:
    with limit(ROOM) as group:
        assert trained("single", str(group), tmp_path).returncode != 0
