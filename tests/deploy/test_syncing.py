"""Nothing acknowledged is lost when the power fails; and the tests see it where it would be."""

from __future__ import annotations

from pathlib import Path

import pytest
from forgetful_disk import run_on_it


def test_no_acknowledged_row_of_the_journal_is_lost(tmp_path: Path) -> None:
    assert run_on_it("journal_on_it.py", tmp_path / "run", "nothing").split() == ["wrote", "60"]


def test_no_acknowledged_update_is_lost(tmp_path: Path) -> None:
    assert run_on_it("updates_on_it.py", tmp_path / "run", "nothing").split() == ["took", "5"]


@pytest.mark.parametrize(
    ("program", "left_out"),
    [("journal_on_it.py", "full"), ("updates_on_it.py", "content"), ("updates_on_it.py", "folder")],
)
def test_a_sync_that_is_left_out_would_be_noticed(
    tmp_path: Path, program: str, left_out: str
) -> None:
    assert "lost" in run_on_it(program, tmp_path / "run", left_out)
