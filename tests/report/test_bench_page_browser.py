"""The page of a benchmark in a real browser: everything is drawn, nothing is asked of the network,
it fits a phone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browser import PROGRAM, chromium

from dure.bench import fit
from dure.bench.page import write
from dure.bench.plan import LADDER, BenchPlan
from dure.bench.result import BenchResult
from dure.collectives import cost

pytestmark = pytest.mark.skipif(
    PROGRAM is None and not os.environ.get("CI"),
    reason="chromium is not installed, and CI is not set",
)


def made_up() -> BenchResult:
    """Times that a cost model predicts; gloo and the floor take a millisecond."""
    plan = BenchPlan(LADDER[::2], (2, 4), ("gloo", "ring", "tree", "one-shot", "memory"))
    link = cost.LinkCost(2e-4, 3e-10, 3e-10, 8e-5, shared=True)
    result = BenchResult({"processor": "p", "cores": 2, "memory": 1, "system": "s"}, {}, plan)
    for ranks in plan.ranks:
        cells = []
        for contender in result.contenders:
            for size in plan.sizes:
                known = contender.kind == "algorithm"
                name = contender.name.replace("-", "_")
                seconds = cost.predict(name, size, ranks, link) if known else 1e-3
                cells.append(
                    {
                        "contender": contender.name,
                        "ranks": ranks,
                        "bytes": size,
                        "calls": 1,
                        "seconds": seconds,
                        "samples": [seconds],
                        "cpu_seconds": seconds,
                    }
                )
        result.add({"cells": cells, "absent": {}, "versions": {}, "interrupted": False})
    return result


def test_the_page_of_a_benchmark_draws_every_chart(tmp_path: Path) -> None:
    result = made_up()
    fit.calibrate(result, tmp_path)
    file = write(result, tmp_path)
    with chromium() as page:
        for dark in (False, True):
            page.open(file, dark=dark)
            assert page.ask("document.body.dataset.errors") == "[]"
            assert page.problems == []
            assert [
                url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))
            ] == []
            traces = (
                "[...document.querySelectorAll('.chart')]"
                ".map(c => c.querySelectorAll('.trace').length)"
            )
            assert page.ask(traces) == [5, 5, 5, 5, 6, 6]
        page.ask("document.querySelector('.legend button').click()")
        assert (
            page.ask("document.querySelectorAll('.chart')[0].querySelectorAll('.trace').length")
            == 4
        )
        page.open(file, width=390, height=800, phone=True)
        assert page.ask("document.documentElement.scrollWidth") == 390
