"""Every attack that docs/security.md calls stopped has a test, and the tests it names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "security.md").read_text()


def rows() -> list[list[str]]:
    """Cells of the rows: who, tries to, stopped by, not stopped, tests."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@cache
def names_of_tests() -> frozenset[str]:
    return frozenset(
        node.name
        for file in TESTS.rglob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}: {row[1][:40]}")
def test_what_is_stopped_has_a_test(row: list[str]) -> None:
    who, tries, stopped, left, tests = row
    named = re.findall(r"`(test_\w+)`", tests)
    assert who
    assert tries
    assert stopped or left
    assert bool(stopped) == bool(named)
    assert not set(named) - names_of_tests()


def test_every_file_of_attacks_is_on_the_page() -> None:
    on_page = set(re.findall(r"`(test_\w+)`", PAGE))
    for file in (TESTS / "security").glob("test_*.py"):
        own = {node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")}
        assert own & on_page, file.name
