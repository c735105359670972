"""What it cost to mix the data stands in the table, beside runs that needed no mixed data."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sample_runs import write_run

from dure.report.read import read_runs
from dure.report.table import table


def rows(folder: Path) -> list[str]:
    """The table's text, a line a row."""
    html = table(read_runs([folder]))
    return [" ".join(re.sub(r"<[^>]+>", " ", row).split()) for row in html.split("</tr>")]


def test_a_shuffle_has_a_column_where_a_run_made_one(tmp_path: Path) -> None:
    for label in ("older", "ADMM", "mixed"):
        write_run(tmp_path / label, label, steps=4, evaluations=2, trace=False)
    assert not any("shuffled per worker" in row for row in rows(tmp_path))
    for label, nbytes, seconds in (("ADMM", 0, 0.0), ("mixed", 4_000_000, 0.5)):
        path = tmp_path / label / "summary.json"
        told = {"shuffle_bytes": nbytes, "shuffle_seconds": seconds}
        path.write_text(json.dumps(json.loads(path.read_text()) | told))
    admm, mixed, older = (
        next(row for row in rows(tmp_path) if row.startswith(label))
        for label in ("ADMM", "mixed", "older")
    )
    assert any("shuffled per worker" in row for row in rows(tmp_path))
    # Two workers: half of it each.
    assert "2.00 MB in 250 ms" in mixed
    assert "nothing" in admm
    assert "nothing" not in older
    assert " in 250" not in older
