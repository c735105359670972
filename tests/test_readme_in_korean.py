"""README.ko.md says what README.md says: the same parts, the same commands, the same systems."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text()
KOREAN = (ROOT / "README.ko.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROSE_IN_CODE = re.compile(r"\s*# (?!\w+\.py$).*$|\"\"\".*?\"\"\"", re.MULTILINE)
"""Comments and docstrings, which are translated; a first line that names a file is not."""
KOREAN_HEADINGS = {
    "Sixty seconds in Python": "Python으로 60초",
    "Sixty seconds in the shell": "셸에서 60초",
    "Your own task": "직접 만드는 태스크",
    "Systems": "시스템",
    "How runs are measured": "실행을 측정하는 방법",
    "Reading on": "더 읽을거리",
    "Licence": "라이선스",
}


def headings(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", FENCE.sub("", text), re.MULTILINE)


def code(text: str) -> list[tuple[str, str]]:
    """Its fenced blocks, without what is said in them."""
    return [(kind, PROSE_IN_CODE.sub("", body)) for kind, body in FENCE.findall(text)]


def links(text: str) -> list[str]:
    """Where it leads, but for the other language."""
    found = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)\"", FENCE.sub("", text))
    return sorted({one or other for one, other in found} - {"README.md", "README.ko.md"})


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def bare(text: str) -> str:
    """Its prose, without code blocks and tables."""
    return "\n".join(line for line in FENCE.sub("", text).splitlines() if not line.startswith("| "))


def test_the_headings_are_translated_each_in_its_place() -> None:
    assert [KOREAN_HEADINGS.get(one) for one in headings(ENGLISH)] == headings(KOREAN)


def test_commands_and_programs_are_the_same() -> None:
    assert code(KOREAN) == code(ENGLISH)
    assert sum("dure train" in body for _, body in code(KOREAN)) >= 4


def test_it_leads_to_the_same_pages_and_names_the_same_code() -> None:
    assert links(KOREAN) == links(ENGLISH)
    named = [sorted(set(re.findall(r"`([^`]+)`", bare(text)))) for text in (ENGLISH, KOREAN)]
    assert named[0] == named[1]


def test_every_system_has_a_row_with_the_same_code_and_state() -> None:
    english, korean = rows(ENGLISH), rows(KOREAN)
    assert len(english) == len(korean)
    for one, other in zip(english, korean, strict=True):
        assert re.findall(r"`[^`]+`", one) == re.findall(r"`[^`]+`", other), other
        states = [("works", "동작"), ("simulated", "시뮬레이션"), ("network", "네트워크")]
        for said, translated in states:
            assert (said in one.split(" | ")[1]) == (translated in other.split(" | ")[1]), other


def test_paragraphs_and_points_are_as_many() -> None:
    parts = [re.split(r"^## .*$", bare(text), flags=re.MULTILINE) for text in (ENGLISH, KOREAN)]
    for one, other in zip(*parts, strict=True):
        assert len(re.findall(r"^- ", one, re.MULTILINE)) == len(
            re.findall(r"^- ", other, re.MULTILINE)
        )
        assert len(re.findall(r"^\*\*", one, re.MULTILINE)) == len(
            re.findall(r"^\*\*", other, re.MULTILINE)
        )


def test_both_lead_to_each_other() -> None:
    assert "(README.ko.md)" in ENGLISH
    assert "(README.md)" in KOREAN
