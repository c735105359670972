from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sample_runs import write_comparison

from dure.report import write_report


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("runs") / "comparison")


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """Write a report and read it back, without the source of plotly."""

    def write(*folders: Path, title: str | None = None) -> str:
        text = write_report(folders, tmp_path / "report.html", title).read_text(encoding="utf-8")
        before, _, rest = text.partition('<script id="plotly">')
        return before + rest.partition("</script>")[2]

    return write
