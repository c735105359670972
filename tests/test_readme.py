"""What the README and the first pages promise is run as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dure.cli.main import main
from scripts import run_here

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["docs/index.md", "docs/getting-started.md", "docs/federated.md"]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return [body for kind, body in FENCE.findall((ROOT / page).read_text()) if kind == language]


def write_task_files(page: str, folder: Path) -> list[str]:
    """Python blocks that begin with `# name.py` become that file in `folder`; the other ones are
    returned."""
    scripts = []
    for block in blocks(page, "python"):
        named = re.match(r"# (\w+\.py)\n", block)
        if named:
            (folder / named[1]).write_text(block)
        else:
            scripts.append(block)
    return scripts


def write_scripts(page: str, folder: Path) -> list[Path]:
    """Its task files, and what is returned: a file for each other block."""
    files = []
    for number, script in enumerate(write_task_files(page, folder)):
        file = folder / f"script_{number}.py"
        file.write_text(script)
        files.append(file)
    assert files
    return files


def test_python_blocks_of_the_readme_run_as_programs(tmp_path: Path) -> None:
    for file in write_scripts("README.md", tmp_path):
        done = subprocess.run(
            [sys.executable, file.name], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_as_scripts(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in write_scripts(page, tmp_path):
        run_here(file)


def test_shell_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_task_files("README.md", tmp_path)
    lines = [
        line
        for block in blocks("README.md", "sh")
        for line in block.splitlines()
        if line.startswith("dure ")
    ]
    assert len(lines) >= 5
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, line
    assert (tmp_path / "report.html").is_file()


def test_pictures_of_the_readme_are_there_and_light() -> None:
    pictures = re.findall(r'src(?:set)?="([^"]+)"', (ROOT / "README.md").read_text())
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).read_bytes()[:4] == b"\x89PNG"
        assert (ROOT / picture).stat().st_size < 300_000


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{page}: {target}"
