"""The key of a job's hosts."""

from __future__ import annotations

import pytest

from dure.machine.group_key import group_key


def test_a_key_is_made_of_the_text_and_does_not_contain_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURE_KEY", raising=False)
    assert group_key() is None
    monkeypatch.setenv("DURE_KEY", "")
    assert group_key() is None
    monkeypatch.setenv("DURE_KEY", "a long secret")
    key = group_key()
    assert key is not None
    assert len(key) == 32
    assert b"secret" not in key
    monkeypatch.setenv("DURE_KEY", "another")
    assert group_key() != key
