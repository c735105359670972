"""`dure bench all-reduce`: a tiny one from end to end, what it refuses, and what it makes of its
measurements."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dure.bench import fit, open_mpi
from dure.bench.page import page
from dure.bench.plan import CONTENDERS, LADDER, BenchPlan, parse_size, size_text
from dure.bench.result import BenchResult
from dure.bench.table import ratio_text, seconds_text, shown
from dure.cli.main import main
from dure.collectives import ALGORITHMS, cost

Dure = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def dure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Dure:
    """Runs a command line in an empty folder; (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(line: str) -> tuple[int, str, str]:
        status = main(shlex.split(line))
        return status, *capfd.readouterr()

    return run


def made_up(plan: BenchPlan, slow: float = 1.0) -> BenchResult:
    """A result whose algorithms take exactly what a link predicts, and whose other contenders take
    a millisecond."""
    link = cost.LinkCost(2e-4, 3e-10, 3e-10, 8e-5, shared=True)
    result = BenchResult(
        {"processor": "<b>", "cores": 2, "memory": 1, "system": "s"}, {"dure": "1"}, plan
    )
    for ranks in plan.ranks:
        cells = []
        for contender in result.contenders:
            for size in plan.sizes:
                name = contender.name.replace("-", "_")
                seconds = (
                    cost.predict(name, size, ranks, link) if contender.kind == "algorithm" else 1e-3
                )
                samples = [seconds, seconds, 2 * seconds]
                cells.append(
                    {
                        "contender": contender.name,
                        "ranks": ranks,
                        "bytes": size,
                        "calls": 3,
                        "seconds": seconds,
                        "samples": samples,
                        "cpu_seconds": seconds,
                    }
                )
        result.add({"cells": cells, "absent": {}, "versions": {}, "interrupted": False})
    return result


def written(result: BenchResult) -> str:
    """The tables as text."""
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(shown(result))
    return console.export_text()


def test_a_tiny_benchmark_writes_json_and_a_page(dure: Dure, tmp_path: Path) -> None:
    line = "bench all-reduce --sizes 4K --ranks 2 --repeats 2 --quick --fit --out out"
    line += " --contenders gloo dure ring memory"
    status, out, err = dure(line)
    assert (status, out) == (0, "")
    assert "all-reduce: 2 ranks, 4 KiB" in err
    assert "benchmark: out/all-reduce.html" in err
    result = json.loads((tmp_path / "out" / "all-reduce.json").read_text())
    assert (result["benchmark"], result["schema"], result["interrupted"]) == (
        "all_reduce",
        1,
        False,
    )
    cells = {cell["contender"]: cell for cell in result["cells"]}
    assert {"gloo", "ring", "memory", *fit.CALIBRATORS} <= set(cells)
    for cell in cells.values():
        assert (cell["ranks"], cell["bytes"], len(cell["samples"])) == (2, 4096, 2)
        assert cell["low"] <= cell["seconds"] <= cell["high"]
        # 2(N-1)/N is 1 for two ranks.
        assert cell["bus_bandwidth"] == pytest.approx(cell["algorithm_bandwidth"])
    assert cells["ring"]["to_gloo"] == pytest.approx(
        cells["gloo"]["seconds"] / cells["ring"]["seconds"]
    )
    assert [link["ranks"] for link in result["calibration"]["links"]] == [2]
    kept = cost.Calibration.load(tmp_path / "cache" / "dure" / "all-reduce.json")
    assert [key[:2] for key in kept.links] == [("gloo", 2)]
    text = (tmp_path / "out" / "all-reduce.html").read_text()
    assert "default-src 'none'" in text
    assert "All-reduce, side by side" in text


@pytest.mark.skipif(open_mpi.absent() is not None, reason="Open MPI is not installed")
def test_open_mpi_adds_up_and_is_gone_afterwards() -> None:
    with open_mpi.OpenMpi(2) as job:
        job.ask("prepare", elements=1500)
        assert job.ask("check") == [{"right": True}] * 2
        answers = job.ask("time", calls=2, warm=True)
        assert [sorted(answer) for answer in answers] == [["cpu", "seconds"]] * 2
        process = job._process
    assert process.poll() is not None


def test_an_open_mpi_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "mpirun"
    broken.write_text("#!/bin/sh\necho no slots here >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="mpirun does not start: no slots here"):
        open_mpi.OpenMpi(2)
    broken.unlink()
    assert open_mpi.absent() == "not installed: there is no mpirun"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("bench", "dure bench all-reduce [options]"),
        ("bench all-gather", "dure bench all-reduce [options]"),
        ("bench all-reduce --sizes 4X", "'4X' is not a size: write bytes, 64K or 16M"),
        ("bench all-reduce --sizes 6", "a tensor of 6 bytes cannot be measured"),
        ("bench all-reduce --sizes 4K 4096", "a size is given twice"),
        ("bench all-reduce --ranks 1", "1 ranks cannot all-reduce: give at least two"),
        ("bench all-reduce --repeats 0", "repeats is 0, but it has to be 1 or more"),
        ("bench all-reduce --contenders glo", "there is no contender 'glo', did you mean 'gloo'?"),
        ("bench all-reduce --size 4K", "did you mean --sizes"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(dure: Dure, line: str, complaint: str) -> None:
    status, out, err = dure(line)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


def test_the_help_tells_the_flags(dure: Dure) -> None:
    status, out, _ = dure("bench all-reduce --help")
    assert status == 0
    flags = (
        "--sizes",
        "--ranks",
        "--contenders",
        "--repeats",
        "--quick",
        "--fit",
        "--out",
        "--json",
    )
    words = re.sub(r"[\s│]+", " ", out)
    assert [word for word in (*flags, *CONTENDERS) if word not in words] == []


def test_the_page_of_benchmarks_explains_every_contender() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert [name for name in CONTENDERS if f"`{name}`" not in text] == []
    assert {name.replace("_", "-") for name in ALGORITHMS} - {"native", "auto"} <= set(CONTENDERS)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("4K", 4096),
        ("64kb", 65536),
        ("16M", 1 << 24),
        ("1 GiB", 1 << 30),
        ("8B", 8),
    ],
)
def test_sizes_are_powers_of_1024(text: str, count: int) -> None:
    assert parse_size(text) == count


def test_numbers_are_written_with_the_digits_that_matter() -> None:
    assert [size_text(size) for size in LADDER[::4]] == ["4 KiB", "1 MiB", "256 MiB"]
    assert [seconds_text(s) for s in (4.214e-6, 0.0123, 1.07)] == ["4.21 µs", "12.3 ms", "1.07 s"]
    assert [ratio_text(r) for r in (None, 0.0123, 0.934, 12.44, 250.4)] == [
        "–",
        "0.012x",
        "0.93x",
        "12.4x",
        "250x",
    ]


def test_ratios_and_the_floor_compare_with_the_same_size_and_ranks() -> None:
    result = made_up(BenchPlan(sizes=(1 << 20,), ranks=(4,)))
    cell: Any = result.cell("dure", 4, 1 << 20)
    assert (cell["to_gloo"], cell["to_open_mpi"], cell["floor_share"]) == (1, 1, 1)
    assert cell["bus_bandwidth"] == pytest.approx((1 << 20) / 1e-3 * 1.5)
    assert (cell["low"], cell["high"]) == (1e-3, 1.5e-3)


def test_a_fit_of_exact_times_predicts_all_algorithms(tmp_path: Path) -> None:
    result = made_up(BenchPlan(sizes=LADDER, ranks=(4, 8)))
    fit.calibrate(result, tmp_path)
    assert result.calibration is not None
    for link in result.calibration["links"]:
        assert link["alpha"] == pytest.approx(2e-4)
        assert link["median_error"] < 1e-6
        assert (link["within"], link["unseen_within"]) == (1, 1)
        assert link["crossovers"]
    assert "halving doubling" in written(result)
    text = page(result, "/* plotly */")
    assert "&lt;b&gt;" in text
    assert "<b>," not in text
    assert text.count("data-fit=") == 2


def test_a_contender_that_is_absent_or_was_skipped_is_a_dash() -> None:
    result = made_up(BenchPlan(sizes=(4096,), ranks=(2,), contenders=("gloo", "open-mpi", "ring")))
    result.absent["open-mpi"] = "not installed: there is no mpirun"
    result.cells[-1] = {
        "contender": "ring",
        "ranks": 2,
        "bytes": 4096,
        "skipped": True,
        "guess": 3.0,
    }
    assert result.as_json()["contenders"][1]["absent"] == "not installed: there is no mpirun"
    assert "not installed: there is no mpirun" in written(result)
    assert "–" in written(result)
    assert "was not measured" in page(result, "")
