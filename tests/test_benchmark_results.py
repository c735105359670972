"""A benchmark that fails, or is interrupted, leaves the result that it had before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import functions_of, run_here

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OLD = '{"rows": "of last week"}'


def test_a_benchmark_that_fails_leaves_the_older_result(tmp_path: Path) -> None:
    result = tmp_path / "asynchronous.json"
    page = tmp_path / "page.md"
    result.write_text(OLD)
    page.write_text("as it was")
    given = ("--data", str(tmp_path), "--result", str(result), "--page", str(page))
    with pytest.raises(Exception, match="lacks train-images"):
        run_here(BENCHMARKS / "asynchronous.py", "--quick", *given)
    assert result.read_text() == OLD
    assert page.read_text() == "as it was"


def test_one_that_is_interrupted_does_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dure.split.alignment.SecretScalar.power", interrupted)
    result = tmp_path / "alignment.json"
    result.write_text(OLD)
    with pytest.raises(KeyboardInterrupt):
        run_here(BENCHMARKS / "alignment.py", "--ids", "4", "--result", str(result))
    assert result.read_text() == OLD


def test_one_that_comes_to_its_end_replaces_it_or_prints(tmp_path: Path) -> None:
    result = tmp_path / "alignment.json"
    result.write_text(OLD)
    run_here(BENCHMARKS / "alignment.py", "--ids", "4", "--result", str(result))
    found = json.loads(result.read_text())
    assert found["ids"] == 4
    assert "commit" in found
    assert [path.name for path in tmp_path.iterdir()] == ["alignment.json"]
    assert json.loads(run_here(BENCHMARKS / "alignment.py", "--ids", "4"))["ids"] == 4


@pytest.mark.parametrize(
    ("script", "page"),
    [("part_memory", "larger-than-memory.md"), ("study_memory", "study-memory.md")],
)
def test_the_table_of_a_page_is_that_of_its_result(script: str, page: str) -> None:
    result = json.loads((BENCHMARKS / "results" / f"{script}.json").read_text())
    table = functions_of(BENCHMARKS / f"{script}.py")["cells"](result["rows"])
    assert table in (BENCHMARKS.parent / "docs" / page).read_text()


def test_the_study_of_families_compares_equal_steps_and_passes() -> None:
    rows = json.loads((BENCHMARKS / "results" / "study_families.json").read_text())["families"]
    assert {(row["batch"], row["epochs"], len(row["accuracies"])) for row in rows} == {(32, 20, 3)}
    steps = {row["system"]: row["steps"] for row in rows}
    for row in rows:
        # The number of steps of a system whose unit is a joint step is what its run has counted.
        if row["unit"] == "step" or row["system"] == "Byzantine GD":
            assert row["rounds"] == row["steps"] == steps["single worker"]
    table = functions_of(BENCHMARKS / "study_families.py")["families_table"](rows)
    assert table in (BENCHMARKS.parent / "docs" / "study-families.md").read_text()


def test_the_table_of_families_of_hugging_face_is_that_of_its_result() -> None:
    result = json.loads((BENCHMARKS / "results" / "hugging_face_plans.json").read_text())
    page = functions_of(BENCHMARKS / "hugging_face_plans.py")["page"](result)
    assert page in (BENCHMARKS.parent / "docs" / "hugging-face-plans.md").read_text()
