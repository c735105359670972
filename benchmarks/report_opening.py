"""How long a report of many runs takes to open in a browser.

    python benchmarks/report_opening.py [--runs 50] [--steps 4000]

Writes run folders of systems with five seeds each, every fifth one a federation, makes their
report, and opens it in chromium three times from a file, each time after the report of its first
run alone, most of which is plotly itself. Told, as JSON: seconds to write the page, its size, and
of each opening the seconds until everything is drawn. All runs have to open below 3 s
(docs/report.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from dure.report import write_report

# The runs and the browser of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "report"))

from browser import Page, chromium
from sample_runs import write_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), asked.runs, asked.steps), indent=1))


def measured(folder: Path, runs: int, steps: int) -> dict[str, object]:
    """What the report of such runs takes."""
    for place in range(runs):
        federated = place // 5 % 5 == 4
        write_run(
            folder / "runs" / str(place),
            f"system {place // 5}",
            steps=steps,
            evaluations=steps // 20,
            workers=10 if federated else 4,
            federated=federated,
            seed=place,
        )
    began = time.perf_counter()
    page = write_report([folder / "runs"], folder / "report.html")
    written = time.perf_counter() - began
    single = write_report([folder / "runs" / "0"], folder / "single.html")
    with chromium() as browser:
        alone, opened = zip(
            *((_opened(browser, single), _opened(browser, page)) for _ in range(3)), strict=True
        )
    return {
        "runs": runs,
        "steps": steps,
        "seconds to write": round(written, 2),
        "bytes": page.stat().st_size,
        "seconds to open one run": alone,
        "seconds to open all": opened,
    }


def _opened(browser: Page, page: Path) -> float:
    began = time.perf_counter()
    # Until every chart is drawn.
    browser.open(page)
    assert browser.problems == [], browser.problems
    return round(time.perf_counter() - began, 2)


if __name__ == "__main__":
    main()
