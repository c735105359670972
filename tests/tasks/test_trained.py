"""Two sites see by what their tasks say of themselves whether they train the same."""

from __future__ import annotations

from typing import Any

import pytest

from dure.contracts.fresh_model import seeded_model
from dure.tasks.task_summary import differences, trains_of
from dure.wire.requests import TaskDescription, from_json, to_json
from small import small_task


def trains(**asked: Any) -> TaskDescription:
    """As it comes over a network."""
    task = small_task(**asked)
    return from_json(to_json(trains_of(task, seeded_model(task, 0))), TaskDescription)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"clip_norm": 1}, "clip_norm is 1.0, but not asked for at the server"),
        ({"precision": "bf16"}, 'precision is "bf16", but not asked for at the server'),
        ({"unfreeze": {"0.*": 2}}, 'unfreeze is {"0.*": 2}, but not asked for at the server'),
    ],
)
def test_what_clients_do_otherwise_is_a_difference(asked: dict[str, Any], said: str) -> None:
    assert differences(trains(**asked), trains()) == [said]
    assert len(differences(trains(), trains(**asked))) == 1
    assert differences(trains(**asked), trains(**asked)) == []


def test_what_the_server_or_each_site_does_by_itself_is_none() -> None:
    assert differences(trains(ema=0.9), trains()) == []
    assert differences(trains(clip_norm=1), trains(clip_norm=1.0)) == []
