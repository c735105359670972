"""What tests of a server share."""

from __future__ import annotations

import pytest


class Clock:
    """Goes when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
