"""The pages in Korean have the parts, commands, code, links and figures of the English pages.

The Korean version of `page.md` is `page.ko.md`, beside it. The code of Korean pages is the code of
the English pages, and tests/test_snippets.py and tests/test_snippets_shell.py run only the latter.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from page_blocks import KOREAN_PAGES
from test_links import FENCE, anchors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROSE_IN_CODE = re.compile(r"[^\S\n]*# (?!\w+\.py$).*$|\"\"\"(?s:.*?)\"\"\"", re.MULTILINE)
"""Comments and docstrings, which are translated; a first line that names a file is not."""
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"")
CODE = re.compile(r"`([^`]+)`")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
HANGUL = re.compile("[가-힣]")
STATES = (("works", "동작"), ("simulated", "시뮬레이션"), ("network", "네트워크"))

IN_LATIN_TOO = {"올리듀스": "all-reduce", "스캐터": "scatter", "스테일니스": "staleness"}
"""Terms that few readers know in Korean letters: a page that has one also has the English term."""
NOT_KOREAN_TERMS = {
    "낙오자": "스트래글러(지연 노드)",
    "소속": "멤버십 추론",
    "사적 교집합": "비공개 집합 교집합(PSI)",
    "장부": "프라이버시 소모량 기록",
    "해동": "언프리징",
    "기울기": "그래디언트",
    "반분과 배증": "재귀적 반감·배가(halving-doubling)",
    "되먹임": "오차 피드백",
    "제한된 지연": "제한된 비동기(SSP)",
    "저마다": "각자, 또는 -마다",
    "기계(?! ?학습)": "머신",
}
"""Literal translations (regular expressions), and the terms that Korean engineers use."""


def english_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".ko.md", ".md"))


PAIRS = [pytest.param(english_of(page), page, id=page.name) for page in KOREAN_PAGES]
in_both = pytest.mark.parametrize(("english", "korean"), PAIRS)


def headings(page: Path) -> list[tuple[int, str]]:
    """The levels and titles of its headings."""
    found = re.findall(r"^(#+) (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return [(len(marks), title) for marks, title in found]


def code(page: Path) -> list[tuple[str, str]]:
    """Its fenced blocks, without comments and docstrings."""
    return [(kind, PROSE_IN_CODE.sub("", body)) for kind, body in BLOCK.findall(page.read_text())]


def links(page: Path) -> Counter[str]:
    """Targets of its links, as on an English page; without links to the page itself in the other
    language."""
    text = FENCE.sub("", COMMENT.sub("", page.read_text()))
    targets = [one or other for one, other in LINK.findall(text)]
    others = {english_of(page).name, page.name.replace(".ko.md", ".md").replace(".md", ".ko.md")}
    return Counter(in_english(page, target) for target in targets if target not in others)


def in_english(page: Path, target: str) -> str:
    """The target, or the same place of the English page if it leads to a Korean page."""
    path, mark, anchor = target.partition("#")
    led = (page.parent / path).resolve() if path else page
    if led not in KOREAN_PAGES:
        return target
    titles = [anchor_of(title) for _, title in headings(led)]
    same = [anchor_of(title) for _, title in headings(english_of(led))]
    return path.replace(".ko.md", ".md") + mark + (same[titles.index(anchor)] if anchor else "")


def anchor_of(title: str) -> str:
    """The anchor of a heading with a title that no other heading of its page has."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def tables(page: Path) -> list[list[str]]:
    """The cells of each row of its tables, without the heads."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line, before in zip(lines[1:], lines, strict=False)
        if line.startswith("| ") and before.startswith("| ") and not line.startswith("| ---")
    ]


def sections(page: Path) -> list[str]:
    """Its prose below each heading, without code, comments, tables and the link to the other
    language."""
    text = FENCE.sub("", COMMENT.sub("", page.read_text()))
    lines = [line for line in text.splitlines() if not re.match(r"\| |\[(English|한국어)\]", line)]
    return re.split(r"^#+ .*$", "\n".join(lines), flags=re.MULTILINE)


def shape(section: str) -> list[str]:
    """The kind of each paragraph and point, in their order."""
    starts = re.findall(r"(?:^|(?<=\n\n))(?=\S)(- |\*\*|<|)|(?<=[^\n]\n)(- )", section.strip())
    return [one or other for one, other in starts]


def numbers(text: str) -> Counter[str]:
    """Figures outside of code and of link targets."""
    return Counter(NUMBER.findall(LINK.sub("]", CODE.sub("", text))))


def test_there_are_pages_in_korean() -> None:
    assert ROOT / "README.ko.md" in KOREAN_PAGES
    assert DOCS / "getting-started.ko.md" in KOREAN_PAGES
    assert [page.name for page in KOREAN_PAGES if not english_of(page).is_file()] == []


@in_both
def test_both_link_to_each_other(english: Path, korean: Path) -> None:
    assert f"\n[한국어]({korean.name})\n" in english.read_text()
    assert f"\n[English]({english.name})\n" in korean.read_text()


@in_both
def test_headings_have_the_same_levels_in_the_same_order(english: Path, korean: Path) -> None:
    assert [level for level, _ in headings(korean)] == [level for level, _ in headings(english)]
    assert [title for _, title in headings(korean)[1:] if not HANGUL.search(title)] == []


@in_both
def test_commands_and_code_are_the_same(english: Path, korean: Path) -> None:
    assert code(korean) == code(english)


@in_both
def test_links_lead_to_the_same_places(english: Path, korean: Path) -> None:
    """The README in Korean also lists the Korean pages."""
    there, here = links(english), links(korean)
    assert there - here == Counter()
    additional = {ROOT / target for target in here - there}
    assert additional <= {english_of(page) for page in KOREAN_PAGES}
    assert not additional or korean == ROOT / "README.ko.md"


@in_both
def test_links_lead_to_korean_pages_where_there_are_any(english: Path, korean: Path) -> None:
    text = FENCE.sub("", korean.read_text())
    paths = {one.partition("#")[0] for one, _ in LINK.findall(text)} - {"", english.name}
    translated = {english_of(page) for page in KOREAN_PAGES}
    assert {path for path in paths if (korean.parent / path).resolve() in translated} == set()


@in_both
def test_rows_of_tables_have_the_same_code_and_figures(english: Path, korean: Path) -> None:
    there, here = tables(english), tables(korean)
    assert len(here) == len(there)
    for one, other in zip(there, here, strict=True):
        assert len(one) == len(other), other
        texts = " | ".join(one), " | ".join(other)
        assert Counter(CODE.findall(texts[0])) == Counter(CODE.findall(texts[1])), other
        assert numbers(texts[0]) == numbers(texts[1]), other


@in_both
def test_prose_has_the_same_paragraphs_code_and_figures(english: Path, korean: Path) -> None:
    there, here = sections(english), sections(korean)
    for one, other in zip(there, here, strict=True):
        assert shape(one) == shape(other), other
        assert set(CODE.findall(one)) == set(CODE.findall(other)), other
        # An English word may be a figure in Korean, but not the other way round.
        assert numbers(one) - numbers(other) == Counter(), other


def test_the_state_of_each_system_is_the_same_in_both_readmes() -> None:
    for one, other in zip(tables(ROOT / "README.md"), tables(ROOT / "README.ko.md"), strict=True):
        for state, translated in STATES:
            assert (state in one[1]) == (translated in other[1]), other


@in_both
def test_terms_are_those_of_korean_engineers(english: Path, korean: Path) -> None:
    text = FENCE.sub("", korean.read_text())
    assert {
        word: better for word, better in NOT_KOREAN_TERMS.items() if re.search(word, text)
    } == {}
    assert [
        latin for word, latin in IN_LATIN_TOO.items() if word in text and latin not in text
    ] == []


def test_a_page_that_is_not_in_step_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\nOne, 2 and `x`.\n\n```sh\ndure --help  # all\n```\n\n- [b](b.md)\n\n## C\n"
    )
    other = tmp_path / "page.ko.md"
    other.write_text("# 가\n\n하나, 3과 `y`.\n\n```sh\ndure --version\n```\n\n### 다\n")
    assert [level for level, _ in headings(page)] != [level for level, _ in headings(other)]
    assert code(page) == [("sh", "dure --help\n")] != code(other)
    assert links(page) - links(other) == Counter({"b.md": 1})
    assert [shape(section) for section in sections(page)] == [[], ["", "- "], []]
    assert numbers(sections(page)[1]) - numbers(sections(other)[1]) == Counter({"2": 1})


def test_anchors_are_those_that_links_need() -> None:
    for page in KOREAN_PAGES:
        assert {anchor_of(title) for _, title in headings(page)} <= anchors(page)
