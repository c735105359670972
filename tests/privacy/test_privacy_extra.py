"""Without the libraries of the extra, protections are refused in one line, before any work."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import dure
from small import small_task


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=4, privacy="secure-aggregation"),
        dure.FedAvg(clients=4, privacy="user-level:1:1"),
        dure.FedAvg(clients=4, privacy="dp-sgd:1:1"),
        dure.SingleWorker(privacy="dp-sgd:1:1"),
        dure.DataParallel(privacy="dp-sgd:1:1"),
    ],
    ids=lambda one: one.label,
)
def test_a_missing_library_is_named_with_what_to_do(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "dp_accounting" else found(name, *more),
    )
    with pytest.raises(ValueError, match="of which dp_accounting is missing: pip install"):
        dure.train(small_task(), strategy, stop=dure.Stop(steps=1, rounds=1))
