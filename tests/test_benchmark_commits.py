"""Pages mark figures whose result was measured before the code that it measures was changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts import functions_of

MEASURED = functions_of(Path(__file__).parents[1] / "benchmarks" / "measured.py")


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a script, its result, and two packages of which it measures one."""
    files = {
        "benchmarks/one.py": "import dure\nprint(dure.FedAvg)\n",
        "benchmarks/results/one.json": "{}",
        "src/dure/federated/strategy.py": "",
        "src/dure/split/server.py": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def forget() -> None:
    MEASURED["older_than_code"].cache_clear()
    MEASURED["_written"].cache_clear()


def change(root: Path, name: str) -> None:
    (root / name).write_text("changed = True\n")
    git(root, "commit", "-qam", name)
    forget()


def test_only_changes_of_the_code_that_a_script_measures_count(root: Path) -> None:
    older = MEASURED["older_than_code"]
    measured_on = git(root, "log", "-1", "--format=%h")
    assert older(root, "one") is None
    change(root, "src/dure/split/server.py")
    assert older(root, "one") is None
    change(root, "src/dure/federated/strategy.py")
    assert older(root, "one") == f"one.json ({measured_on}; changed since: federated)"


def test_a_result_that_says_its_commit_is_of_that_one(root: Path) -> None:
    change(root, "src/dure/federated/strategy.py")
    (root / "benchmarks/results/one.json").write_text(
        json.dumps({"commit": MEASURED["commit"](root)})
    )
    git(root, "commit", "-qam", "measured again")
    forget()
    assert MEASURED["older_than_code"](root, "one") is None


def test_a_page_without_results_stays_as_it_is() -> None:
    assert MEASURED["on_page_markdown"]("# Title\ntext") == "# Title\ntext"
