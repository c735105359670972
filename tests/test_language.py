"""Docstrings begin with a verb and its object, or with a noun phrase that names the thing.

A first line such as "What a rank holds." names nothing.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import dure

SOURCE = Path(dure.__file__).parent
HEADLESS = re.compile(
    r"(What|Who|Whom|Whose|Where|When|How|Those|That|Which|The same|One|Ones|Its|Of|Nobody|But"
    r"|It|They|Inside|Here|There|Best is)\b"
    r"|.*\b(nobody|somebody)\b"
)
LIMIT = 0.02
"""Share of headless first lines that a package may have."""
RARE = ("what", "one")
"""Words that stand for a noun which the reader has to guess."""
PER_THOUSAND = 4


def is_headless(line: str) -> bool:
    """Return whether a docstring's first line has no head noun and no verb."""
    return bool(HEADLESS.match(line))


def docstrings(place: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, docstring) of a file, or of all files below a folder."""
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{file.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", text


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
    words: Counter[str] = Counter()
    for place in sorted(SOURCE.iterdir()):
        if not place.is_dir() and place.suffix != ".py":
            continue
        found = list(docstrings(place))
        lines = [f"{where}: {text.splitlines()[0]}" for where, text in found]
        headless = [line for line in lines if is_headless(line.partition(": ")[2])]
        assert len(headless) <= LIMIT * len(found), "\n".join(headless)
        for _, text in found:
            words.update(re.findall(r"[a-z']+", text.lower()))
    for word in RARE:
        assert 1000 * words[word] < PER_THOUSAND * words.total(), word


def test_a_class_name_occurs_once() -> None:
    classes = Counter(
        node.name
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []
