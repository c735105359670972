"""Without the libraries of the extra a server is refused in one line, before any work."""

from __future__ import annotations

import importlib.util

import pytest

from dure.cli.main import main
from dure.deploy.world import Network


def test_a_missing_library_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in ("uvicorn", "starlette") else found(name, *more),
    )
    with pytest.raises(ValueError, match="of which starlette, uvicorn is missing: pip install"):
        Network()
    assert main(["serve", "digits", "fed-avg", "--clients", "2", "--rounds", "1", "--local"]) == 2
    assert "of which starlette, uvicorn is missing" in capsys.readouterr().err
