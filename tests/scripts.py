"""Scripts as a user runs them, without the seconds that a new interpreter needs to load torch."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


def run_here(script: Path, *arguments: str) -> str:
    """Runs it as `__main__` of this process, in the current folder; what it has printed."""
    said = io.StringIO()
    with (
        _modules_beside(script),
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        contextlib.redirect_stdout(said),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return said.getvalue()


def functions_of(script: Path) -> dict[str, Any]:
    """Return the global names of a script, which is not run as `__main__`."""
    with _modules_beside(script):
        return runpy.run_path(str(script))


@contextmanager
def _modules_beside(script: Path) -> Iterator[None]:
    """What lies in the script's folder and below can be imported, and is forgotten afterwards:
    another script, and the tests, may have modules of the same names."""
    beside = {entry.stem for entry in script.parent.rglob("*.py")}
    away = {name: sys.modules.pop(name) for name in beside & set(sys.modules)}
    before = set(sys.modules)
    try:
        with mock.patch.object(sys, "path", [str(script.parent), *sys.path]):
            yield
    finally:
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(script.parent):
                del sys.modules[name]
        sys.modules.update(away)
