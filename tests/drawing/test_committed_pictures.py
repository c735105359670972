"""Each picture of docs/images that `dure draw` makes is what the command below it makes today.

If not: run the command on the page, in docs/images/.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.cli.drawing import SUBJECTS
from dure.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
OUT = "--out"


def drawn() -> Iterator[tuple[str, Path]]:
    """Yield the commands that write a picture, and their pages."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if line.startswith("dure draw ") and f" {OUT} " in line:
                yield " ".join(line.split()), page


COMMANDS = list(drawn())


@pytest.mark.parametrize(("command", "page"), COMMANDS, ids=lambda value: str(value)[-40:])
def test_a_committed_picture_is_what_its_command_makes(
    command: str, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)[1:]
    name = arguments[arguments.index(OUT) + 1]
    assert f"(images/{name})" in page.read_text()
    assert main(arguments) == 0
    assert (tmp_path / name).read_text() == (DOCS / "images" / name).read_text()


def test_every_subject_has_a_picture_on_a_page() -> None:
    assert {shlex.split(command)[2] for command, _ in COMMANDS} == set(SUBJECTS)
