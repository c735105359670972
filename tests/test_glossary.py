"""What the glossary says a thing is called in dure, is called so."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from dure import catalog
from dure.federated import aggregate

PAGE = Path(__file__).parents[1] / "docs" / "glossary.md"
HEAD = "| word | 한국어 | in dure | |"


def rows() -> list[list[str]]:
    """The cells of all its tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if line != HEAD and not line.startswith("| ---")
    ]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


NAMED = sorted({word for row in rows() for cell in row[2:] for word in words(cell)})
OF_OTHERS = {"columns", "rows", "stragglers:0.25:5"}
"""Values of options, which their own pages explain."""


def value_of(word: str) -> Any:
    """What a dotted name stands for: a module, a class, or a field of a class."""
    parts = word.split(".")
    # The longest beginning that is a module; dure itself has the classes.
    for end in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[end:]:
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        found = [field for field in fields if field.name == part]
        value = found[0] if found else getattr(value, part)
    return value


@pytest.mark.parametrize("word", [word for word in NAMED if word not in OF_OTHERS])
def test_every_word_of_dures_is_there(word: str) -> None:
    if word.startswith("dure."):
        assert value_of(word) is not None
    elif word not in catalog.SYSTEMS:
        assert aggregate.parse(word) is not None


def test_a_word_that_is_not_there_is_seen() -> None:
    with pytest.raises(AttributeError):
        value_of("dure.FedAvg.rho")
    with pytest.raises(ValueError, match="medium"):
        aggregate.parse("medium")


def test_every_row_is_in_both_languages_and_has_a_name_in_dure() -> None:
    assert len(rows()) >= 40
    for row in rows():
        assert re.search("[가-힣]", row[1]), row
        assert words(row[2]), row
