"""The fenced blocks of the README and of docs/, and what is said to their tests beside them.

A comment of HTML right above a block, which no reader of the page sees, says how it is tested:

    <!-- first              what stands in the comment is run before the block: names that a reader
    model = nn.Linear(4, 2) has and the page does not
    -->
    <!-- on 2 ranks -->     the block is a part of a program that this many processes run
    <!-- not run: WHY -->   nothing here can run it
    <!-- not run (WORD): WHY -->        the same of the lines with that word
    <!-- printed -->        a text block: what the Python block above it prints

Blocks of Python that begin with `# name.py` are files, which the page's other blocks import or
name; each is a program of its own. All others of a page are one program, in their order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
KOREAN_PAGES = [ROOT / "README.ko.md", *sorted(DOCS.glob("*.ko.md"))]
"""Their code is that of the English pages (tests/test_korean_pages.py), and is not run again."""
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.glob("*.md")) if page not in KOREAN_PAGES),
]
"""Pages in English, whose code is run."""
PYTHON = ("python", "py")
SHELL = ("sh", "")
BLOCK = re.compile(r"((?:^<!--(?:(?!-->).)*-->\n)*)^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->$", re.M | re.S)
NAMED = re.compile(r"# (\w+\.py)\n")
NOT_RUN = re.compile(r"not run(?: \(([^)]+)\))?: (.+)", re.S)
ON_RANKS = re.compile(r"on (\d+) ranks")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: that of its first line of text, from 0; first: lines of the page that
    come before it, by their number; without: a word whose lines are not run."""

    language: str
    body: str
    line: int
    first: dict[int, str] = field(default_factory=dict)
    ranks: int = 1
    not_run: str = ""
    without: str = ""
    printed: bool = False

    @property
    def file(self) -> str:
        """The name of the file that it is, or nothing."""
        named = NAMED.match(self.body) if self.language in PYTHON else None
        return named[1] if named else ""

    @property
    def runs(self) -> bool:
        return not self.not_run or bool(self.without)

    def lines(self) -> dict[int, str]:
        """What is run of it, by the number of the line on the page."""
        there = dict(enumerate(self.body.splitlines(), self.line))
        told = {
            n: text for n, text in there.items() if not self.without or self.without not in text
        }
        return {**self.first, **told}


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    text = page.read_text()
    return [_block(text, found) for found in BLOCK.finditer(text)]


def _block(text: str, found: re.Match[str]) -> Block:
    comments, language, body = found.groups()
    told: dict[str, object] = {}
    for comment in COMMENT.finditer(comments):
        told |= _told(comment[1], _line(text, found.start() + comment.start()))
    return Block(language, body, _line(text, found.start(3)), **told)  # type: ignore[arg-type]


def _told(comment: str, line: int) -> dict[str, object]:
    """What a comment says of the block below it; nothing where it speaks of something else."""
    if comment.startswith("first\n"):
        return {"first": dict(enumerate(comment.splitlines()[1:], line + 1))}
    if ranks := ON_RANKS.fullmatch(comment):
        return {"ranks": int(ranks[1])}
    if left_out := NOT_RUN.fullmatch(comment):
        return {"without": left_out[1] or "", "not_run": " ".join(left_out[2].split())}
    return {"printed": True} if comment == "printed" else {}


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place)


@dataclass(frozen=True)
class Program:
    """What is run of a page's Python: a file of this name with this text, on so many ranks.

    printed: all that the page says that it prints; nothing where the page does not say."""

    name: str
    text: str
    ranks: int = 1
    printed: str = ""


def programs(page: Path) -> list[Program]:
    """The files that a page shows, and then all its other blocks of Python as one program, or as
    two where several ranks run some of them. A line has the number that it has on the page."""
    of_python = [block for block in blocks(page) if block.language in PYTHON and block.runs]
    files = [Program(one.file, one.body, one.ranks) for one in of_python if one.file]
    printed = "".join(block.body for block in blocks(page) if block.printed)
    rest = [block for block in of_python if not block.file]
    alone = [block for block in rest if block.ranks == 1]
    together = [block for block in rest if block.ranks > 1]
    ranks = max((block.ranks for block in together), default=1)
    name = page.stem.replace("-", "_")
    return [
        *files,
        *([Program(f"page_{name}.py", _joined(alone), printed=printed)] if alone else []),
        *([Program(f"ranks_{name}.py", _joined(together), ranks)] if together else []),
    ]


def _joined(parts: list[Block]) -> str:
    lines = {n: text for block in parts for n, text in block.lines().items()}
    return "\n".join(lines.get(n, "") for n in range(max(lines) + 1)) + "\n"


def write_files(page: Path, folder: Path) -> None:
    """Writes the files that a page shows."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.body)


def shell(page: Path) -> Iterator[tuple[int, str]]:
    """The shell lines of a page that are run, with the number that an editor gives them; a line
    that ends with a backslash goes on."""
    for block in blocks(page):
        if block.language in SHELL and block.runs:
            yield from _commands(block)


def _commands(block: Block) -> Iterator[tuple[int, str]]:
    begun = ""
    for number, text in sorted(block.lines().items()):
        begun += text.removesuffix("\\")
        if not text.endswith("\\") and begun.strip():
            yield number + 1, begun
            begun = ""


def words(command: str) -> list[str]:
    """Of a shell line, without its remark."""
    return shlex.split(command, comments=True)
