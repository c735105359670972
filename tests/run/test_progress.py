"""Bars of a notebook; what is drawn there is compared with a run that was."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

import dure
from dure.contracts.stop import Stop
from dure.run.progress import bars_here
from small import small_task


@pytest.fixture
def notebook(monkeypatch):
    """IPython as a notebook has it; gives what was drawn."""
    drawn: list[str] = []
    handle = SimpleNamespace(update=drawn.append)

    def display(content, display_id):
        drawn.append(content)
        return handle

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    shown = SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return drawn


def test_a_notebook_shows_a_bar_for_each_run(notebook):
    systems = [dure.SingleWorker(10), (dure.SingleWorker(20), None, small_task(), "<mine>")]
    dure.compare(small_task(), systems, stop=Stop(steps=3))
    assert re.findall(r'value="([\d.]+)"', notebook[-1]) == ["1.0000", "1.0000"]
    assert "single worker" in notebook[-1]
    assert "&lt;mine&gt;" in notebook[-1]
    assert "step 3" in notebook[-1]
    assert "test_loss" not in notebook[-1]


def test_whoever_is_told_of_progress_draws_it_himself(notebook):
    told = []
    dure.train(small_task(), dure.SingleWorker(10), stop=Stop(steps=2), on_progress=told.append)
    assert told
    assert not notebook
    dure.train(small_task(), dure.SingleWorker(10), stop=Stop(steps=2))
    assert 'value="1.0000"' in notebook[-1]


def test_there_are_no_bars_where_no_notebook_is(monkeypatch):
    assert bars_here(Stop(steps=1)) is None
    terminal = SimpleNamespace(get_ipython=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert bars_here(Stop(steps=1)) is None
