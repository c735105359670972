"""Docstrings begin with a verb and its object, or with a noun phrase that names the thing.

A first line such as "What a rank holds." names nothing. Packages in `UNREAD` are not rewritten yet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dure

SOURCE = Path(dure.__file__).parent
HEADLESS = re.compile(
    r"(What|Who|Whom|Whose|Where|When|How|Those|That|Which|The same|One|Ones|Its|Of|Nobody|But)\b"
)
OBSCURE = re.compile(r"^The place of nobody\b|^It is told\b|^Inside, what\b|^Best is\b")
"""Sentences of earlier versions that no rule on the first word finds."""
UNREAD: frozenset[str] = frozenset()
"""Packages whose docstrings are older than this rule."""
LIMIT = 0.02
"""Share of headless first lines that a package may have."""


def is_headless(line: str) -> bool:
    """Return whether a docstring's first line has no head noun and no verb."""
    return bool(HEADLESS.match(line) or OBSCURE.match(line))


def first_lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, first line) of every docstring below a folder."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    place = f"{file.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}"
                    yield place, text.splitlines()[0]


@pytest.mark.parametrize(
    "line",
    [
        "Those of the weights, since this was asked last; None of one that got none.",
        "The place of nobody is given to another.",
        "How many jobs with so many rows make a cohort.",
        "Best is the first evaluation of which `monitor` is better than at all before.",
    ],
)
def test_the_rule_finds_lines_that_readers_could_not_follow(line: str) -> None:
    assert is_headless(line)


def test_docstrings_name_what_they_describe() -> None:
    folders = [each for each in sorted(SOURCE.iterdir()) if each.is_dir()]
    for folder in folders:
        if folder.name in UNREAD | {"__pycache__"}:
            continue
        lines = list(first_lines(folder))
        headless = [f"{place}: {line}" for place, line in lines if is_headless(line)]
        assert len(headless) <= LIMIT * len(lines), "\n".join(headless)


def test_packages_that_are_rewritten_are_not_in_the_list() -> None:
    for name in UNREAD:
        lines = list(first_lines(SOURCE / name))
        assert sum(is_headless(line) for _, line in lines) > LIMIT * len(lines), name
