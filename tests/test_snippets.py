"""Every block of Python on every page runs, and prints what the page says that it prints.

How a page says what its tests need: tests/page_blocks.py."""

from __future__ import annotations

import doctest
import os
import re
import socket
from pathlib import Path

import pytest
import torch

import dure
from dure.contracts.world import RankContext
from page_blocks import PAGES, Program, programs, write_files
from scripts import run_here

NUMBER = re.compile(r"\d+(?:\.\d+)?")
PAGES_WITH_PYTHON = [page for page in PAGES if programs(page)]


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    for program in programs(page):
        (tmp_path / program.name).write_text(program.text)
        if program.ranks > 1:
            run_on_ranks(program)
        elif ">>> " in program.text:
            look_at_session(program)
        else:
            look_at_printed(program, run_here(tmp_path / program.name))


def look_at_session(program: Program) -> None:
    session = doctest.DocTestParser().get_doctest(program.text, {"dure": dure}, "page", None, 0)
    assert doctest.DocTestRunner().run(session).failed == 0


def look_at_printed(program: Program, said: str) -> None:
    """Words are the same, and numbers about the same: the readers' processors round otherwise."""
    if program.printed:
        assert NUMBER.sub("N", said) == NUMBER.sub("N", program.printed), said
        told, seen = ([float(n) for n in NUMBER.findall(text)] for text in (program.printed, said))
        assert seen == pytest.approx(told, rel=0.05, abs=0.03), said


def run_on_ranks(program: Program) -> None:
    """As torchrun does it, in processes that have loaded torch already.

    NEXT_PORT is for a program that initialises a second time: at the port of the first time, a rank
    that is early would find the store that the leader is about to close.
    """
    with socket.socket() as free, socket.socket() as later:
        free.bind(("127.0.0.1", 0))
        later.bind(("127.0.0.1", 0))
        port, next_port = free.getsockname()[1], later.getsockname()[1]

    def rank(context: RankContext) -> None:
        group = context.group
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["NEXT_PORT"] = str(next_port)
        os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.size)}
        os.environ |= {"LOCAL_RANK": str(group.rank), "LOCAL_WORLD_SIZE": str(group.size)}
        run_here(Path(program.name))

    dure.Processes(program.ranks, deadline=60).run(rank, lambda event: None)
