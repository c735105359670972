"""Every shell line on every page runs, in the order of the page and in one folder for each page.

Lines for several machines and the like say so beside them (tests/page_blocks.py). Benchmarks are
not run here: tests/test_docs.py reads their arguments, and benchmarks/results has what they
measured."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dure
from dure.cli.main import main
from page_blocks import PAGES, PYTHON, Block, blocks, shell, words, write_files
from stand_ins import images, patients, plays

SOON = ("README.md", "getting-started.md")
"""Pages that a newcomer follows first: `make test` runs them, and `make proofs` all others."""
BENCHMARK = "python benchmarks/"
MOST_NOT_RUN = 40
"""Blocks that nothing here can run. Who adds one has to find none of them needless."""
REASONS = (
    "machines of their own",
    "another machine",
    "several machines",
    "torchrun has to have started it",
    "installs",
    "minutes",
    "need not be installed",
    "runs it",
)
"""What may be said of a block that is not run, or a part of it."""


def lines(page: Path) -> list[tuple[int, str]]:
    return [(n, line) for n, line in shell(page) if not line.startswith(BENCHMARK)]


WITH_LINES = [page for page in PAGES if lines(page)]


@pytest.mark.parametrize(
    "page", [page for page in WITH_LINES if page.name in SOON], ids=lambda page: page.name
)
def test_the_shell_lines_of_the_first_pages_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_lines(page, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "page", [page for page in WITH_LINES if page.name not in SOON], ids=lambda page: page.name
)
def test_the_shell_lines_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_lines(page, tmp_path, monkeypatch)


def run_lines(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    write_files(page, folder)
    text = page.read_text()
    for stands_in, make in (("mnist", images), ("heart", patients), ("shakespeare.txt", plays)):
        if f"--data {stands_in}" in text:
            make(folder / stands_in)
    for number, line in lines(page):
        assert run_line(line) == 0, f"{page.name}:{number}: {line}"


def run_line(line: str) -> int:
    """Its exit status. dure's own commands are run here: a process of their own would first load
    torch, for longer than most of them take."""
    asked = words(line)
    if asked[0] == "dure":
        try:
            return main(asked[1:])
        except SystemExit as end:  # --help
            return int(end.code or 0)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line], env={**os.environ, "PATH": beside}, timeout=300
    ).returncode


def not_run() -> Iterator[tuple[str, Block]]:
    for page in PAGES:
        yield from ((page.name, block) for block in blocks(page) if block.not_run)


def test_what_is_not_run_is_little_and_says_why() -> None:
    left_out = list(not_run())
    assert len(left_out) <= MOST_NOT_RUN
    unknown = [
        (page, block.not_run)
        for page, block in left_out
        if not any(reason in block.not_run for reason in REASONS)
    ]
    assert unknown == []


@pytest.mark.parametrize(("page", "block"), list(not_run()), ids=str)
def test_python_that_is_not_run_calls_what_there_is(page: str, block: Block) -> None:
    if block.language not in PYTHON:
        return
    for call in ast.walk(ast.parse(block.body)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("dure."):
            path = ast.unparse(call.func).removeprefix("dure.").split(".")
            called = functools.reduce(getattr, path, dure)
            named = {word.arg: None for word in call.keywords if word.arg is not None}
            inspect.signature(called).bind(*call.args, **named)
