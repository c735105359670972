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

DOCS = Path(__file__).parents[1] / "docs"
HEADS = {
    "glossary.md": "| word | 한국어 | in dure | |",
    "glossary.ko.md": "| 한국어 | English | dure에서 | 설명 |",
}


def rows(page: str = "glossary.md") -> list[list[str]]:
    """The cells of all tables of the glossary in English or in Korean."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if line != HEADS[page] and not line.startswith("| ---")
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


def test_the_korean_glossary_has_the_same_terms_and_explains_each_in_korean() -> None:
    korean = rows("glossary.ko.md")
    assert [[row[1], row[0], row[2]] for row in korean] == [row[:3] for row in rows()]
    assert [row for row in korean if not re.search("[가-힣]", row[3])] == []


@pytest.mark.parametrize(
    ("term", "name"),
    [
        ("sub-minibatch", "dure.Pipeline.microbatches"),
        ("label leakage", "dure.split.leakage.labels"),
        ("one-shot all-reduce", "dure.collectives.algorithms.one_shot"),
        ("multipliers", "dure.ADMM.duals"),
        ("classic parallel SGD", "data-parallel"),
        ("GIL", "dure.Threads"),
        ("on-device", "dure.Client"),
    ],
)
def test_a_term_of_lectures_leads_to_its_name_in_dure(term: str, name: str) -> None:
    found = [row for row in rows() if term in row[0]]
    assert len(found) == 1
    assert name in words(found[0][2])
