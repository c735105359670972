"""What of a config decides what is computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dure.record.settings import changed as what_changed
from dure.record.settings import (
    config_digest,
    edited,
    other_run,
    settings,
    with_sums,
    without_sums,
)

CONFIG: dict[str, Any] = {
    "label": "x",
    "seed": 0,
    "task": {"name": "digits", "options": {"lr": 0.1}, "title": "digits"},
    "strategy": {
        "name": "mine",
        "from": "/home/me/my_rules.py:Mine",
        "aggregate": "clipped:1//home/me/my_rules.py:Middle:2",
    },
    "world": {"name": "simulated", "devices": "equal:100.0", "deadline": 60.0},
    "stop": {"rounds": 3},
    "train_examples": 12,
}


def changed(part: str, **values: Any) -> dict[str, Any]:
    return {**CONFIG, part: {**CONFIG[part], **values}}


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "label": "y", "stop": {"rounds": 9}},
        changed("task", title="other"),
        changed("strategy", **{"from": "/srv/rules.py:Mine"}),
        changed("strategy", aggregate="clipped:1//srv/old/rules.py:Middle:2"),
        changed("world", deadline=5.0),
    ],
)
def test_some_of_it_may_change(config: dict[str, Any]) -> None:
    assert edited(settings(CONFIG), settings(config)) == []
    assert other_run(settings(CONFIG), settings(config)) == []


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**CONFIG, "seed": 1}, "seed"),
        ({**CONFIG, "train_examples": 11}, "train_examples"),
        (changed("strategy", aggregate="clipped:2//home/me/my_rules.py:Middle:2"), "strategy"),
        (changed("strategy", aggregate="clipped:1//home/me/my_rules.py:Middle:3"), "strategy"),
        (changed("strategy", aggregate="clipped:1//home/me/my_rules.py:Other:2"), "strategy"),
        (changed("strategy", aggregate="clipped:1/median"), "strategy"),
    ],
)
def test_the_rest_may_not(config: dict[str, Any], name: str) -> None:
    for differs in (edited, other_run):
        (said,) = differs(settings(CONFIG), settings(config))
        assert said.startswith(name)


def test_what_the_user_names_again_is_not_compared_with_the_config() -> None:
    config = changed("world", devices="lognormal:1")
    assert edited(settings(CONFIG), settings(config))[0].startswith("world.devices is 'lognormal")
    assert edited(settings(CONFIG), settings(config), ["world"]) == []
    other = changed("task", name="/home/me/my_task.py:task", options={})
    assert edited(settings(CONFIG), settings(other), ["task.name"]) == [
        "task.options is {} but was {'lr': 0.1}"
    ]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (CONFIG, None),
        ({**CONFIG, "label": "y"}, "rest"),
        ({**CONFIG, "stop": {"rounds": 4}}, "rest"),
        ({**CONFIG, "seed": 1}, "settings"),
        (changed("task", options={"lr": 0.2}), "settings"),
    ],
)
def test_what_has_changed_in_a_config_is_told_by_its_checksums(
    config: dict[str, Any], what: str | None
) -> None:
    written = with_sums(CONFIG)
    assert without_sums(written) == CONFIG
    assert what_changed({**written, **config}) == what
    assert config_digest(written) == config_digest(CONFIG)
    # An older dure wrote none.
    assert what_changed(config) is None


def test_a_config_is_as_it_was_written_whatever_kinds_its_values_had_in_memory() -> None:
    config = {**CONFIG, "world": {"name": "threads", "devices": ("cpu", "cpu"), "threads": 2}}
    assert what_changed(json.loads(json.dumps(with_sums(config)))) is None
