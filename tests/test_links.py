"""Links lead somewhere: from pages outside of docs/, which mkdocs does not see, and from code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure import catalog

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = [
    page
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
    if page.is_file()
]
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = [
    file
    for folder in ("src", "benchmarks", "examples")
    for file in sorted((ROOT / folder).rglob("*.py"))
]


def links(page: Path) -> Iterator[str]:
    """What a page links to, outside of its code."""
    for one, other in LINK.findall(FENCE.sub("", page.read_text())):
        yield one or other


def anchors(page: Path) -> set[str]:
    """Where in a page a link can lead, as GitHub names its headings."""
    found: Counter[str] = Counter()
    names = set()
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere here; those to other machines are not followed."""
    lost = []
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        led = target.exists() and target.is_relative_to(ROOT)
        if not led or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = DOCS / "collectives.md"
    assert "a-ring-step-by-step" in anchors(page)
    assert "a-ring" not in anchors(page)
    lost = tmp_path / "lost.md"
    lost.write_text("[there](https://example.org) [here](lost.md#none) [no](none.md)\n# One\n")
    assert broken(lost) == ["lost.md#none", "none.md"]


def test_pages_that_code_names_are_there() -> None:
    """Errors, help and comments send people to `docs/….md`."""
    named = {
        (file.name, page)
        for file in CODE
        for page in re.findall(r"docs/[a-z0-9/-]+\.md", file.read_text())
    }
    assert len(named) > 5
    assert [one for one in sorted(named) if not (ROOT / one[1]).is_file()] == []


def test_every_page_is_in_the_navigation_and_each_question_names_what_there_is() -> None:
    settings, _, nav = (ROOT / "mkdocs.yml").read_text().partition("nav:\n")
    left_out = {page for page in PAGES if f": {page.relative_to(DOCS)}" not in nav}
    assert {str(page.relative_to(DOCS)) for page in left_out} == {"study-gpu.md"}
    # A page without figures leaves the navigation, and says so.
    assert all(f"  {page.relative_to(DOCS)}\n" in settings for page in left_out)
    assert all("No figure on this page is measured yet" in page.read_text() for page in left_out)
    questions = (DOCS / "index.md").read_text().partition("## By question")[2]
    questions = questions.partition("## By subject")[0]
    rows = [row for row in questions.splitlines() if row.startswith("| ")][2:]
    assert len(rows) >= 15
    assert all("](" in row.split(" | ")[1] for row in rows)
    named = {word for row in rows for word in re.findall(r"`([a-z-]+)`", row.split(" | ")[2])}
    assert sorted(named - set(catalog.SYSTEMS) - {"aggregate"}) == []
