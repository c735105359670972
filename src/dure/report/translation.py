"""The language of the page: English texts in the code, translated by a catalogue.

    in_language     the language of everything that is rendered inside a `with` block
    translated      an English template -> the same in that language, with its values filled in
    words           texts of the scripts, which are data of the page

An English text in the code is the key of its translation. A text without a translation stays in
English, and so do names, units and the contents of run folders that no catalogue knows. A catalogue
is a JSON file beside this module:

    texts       texts of the modules
    scripts     texts of the scripts
    counted     noun -> phrase with a number, such as step -> {count}스텝
    recorded    metrics, and texts that run folders contain, such as {count} processes

The language is a context variable and not a parameter: almost every function of the report makes
text, down to `dure.report.formatting`, and each would only pass the parameter on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

ENGLISH = "en"

CATALOGUES = {"ko": "korean.json"}
"""File of each language except English."""

STYLES = {"ko": "body{word-break:keep-all}"}
"""Style of a language, after the styles of the page: Korean breaks lines between words."""

_VALUES = {"count": r"[0-9.,]+", "number": r"[0-9]+"}
"""Patterns of values in recorded texts, by the name of their place; any other value is a text."""

_LANGUAGE = ContextVar("language", default=ENGLISH)


def check_language(name: str) -> str:
    """Return the name of a known language; raise ValueError for any other."""
    known = (ENGLISH, *CATALOGUES)
    if name not in known:
        raise ValueError(f"language {name!r} is unknown: choose one of {', '.join(known)}")
    return name


@contextmanager
def in_language(name: str) -> Iterator[None]:
    """Render in a language inside the block. Raises ValueError for an unknown language."""
    before = _LANGUAGE.set(check_language(name))
    try:
        yield
    finally:
        _LANGUAGE.reset(before)


def language() -> str:
    """Return the language now, as HTML names it: en, ko."""
    return _LANGUAGE.get()


def style() -> str:
    """Return the style of the language; empty in English."""
    return STYLES.get(language(), "")


def translated(template: str, **values: object) -> str:
    """Return a text in the language, with values for the names in braces."""
    found = _of("texts").get(template, template)
    return found.format(**values) if values else found


def counted(number: str, unit: str) -> str | None:
    """Return a number with its noun; None if the language has no phrase for the noun."""
    phrase = _of("counted").get(unit)
    return None if phrase is None else phrase.format(count=number)


def recorded(word: str) -> str:
    """Return a metric or a word of a run folder in the language; itself if it is unknown."""
    known = _of("recorded")
    if not known or word in known:
        return known.get(word, word)
    for pattern, template in _patterns(language()):
        found = pattern.fullmatch(word)
        if found is not None:
            return template.format(**found.groupdict())
    # A list of texts, such as the exposures of a run.
    parts = word.split("; ")
    return word if len(parts) == 1 else "; ".join(map(recorded, parts))


@cache
def _patterns(name: str) -> list[tuple[re.Pattern[str], str]]:
    """Return the recorded texts with places for values, as patterns with their translations."""
    found = []
    for english, template in catalogue(name)["recorded"].items():
        if "{" in english:
            parts = re.split(r"\{(\w+)\}", english)
            # Texts and names of places alternate.
            inside = [
                f"(?P<{part}>{_VALUES.get(part, '[^;]+')})" if place % 2 else re.escape(part)
                for place, part in enumerate(parts)
            ]
            found.append((re.compile("".join(inside)), template))
    return found


def words() -> Mapping[str, str]:
    """Return the translations that the scripts need; empty in English."""
    return _of("scripts")


def _of(part: str) -> Mapping[str, str]:
    name = language()
    return {} if name == ENGLISH else catalogue(name)[part]


@cache
def catalogue(name: str) -> dict[str, dict[str, str]]:
    """Return the catalogue of a language, by part."""
    content = Path(__file__).with_name(CATALOGUES[name]).read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = json.loads(content)
    return found
