"""Who was there when, and what of it a run's folder has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dure.deploy.server import presence as module
from dure.deploy.server.presence import PresenceLog

sys.path.insert(0, str(Path(__file__).parents[1]))
from federation import Federation


def test_a_span_is_from_coming_to_going() -> None:
    presence = PresenceLog()
    presence.came(1, 2.0)
    presence.came(0, 3.0)
    presence.came(1, 3.5)  # it was there already
    presence.went(1, 5.0)
    presence.went(1, 6.0)  # it had gone already
    presence.came(1, 7.0)
    assert presence.spans(9.0) == [[1, 2.0, 5.0], [0, 3.0, 9.0], [1, 7.0, 9.0]]


def test_what_was_saved_goes_on() -> None:
    presence, again = PresenceLog(), PresenceLog()
    presence.came(0, 1.0)
    presence.came(1, 1.0)
    presence.went(1, 2.0)
    again.restore(json.loads(json.dumps(presence.state())))
    for one in (presence, again):
        one.went(0, 4.0)
        one.came(1, 5.0)
    assert again.spans(6.0) == presence.spans(6.0)


def test_it_does_not_grow_without_bound(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST", 10)
    presence = PresenceLog()
    for at in range(100):
        presence.came(0, at)
        presence.went(0, at + 0.5)
    assert len(presence.spans(100.0)) == 10


def test_a_run_keeps_its_cohort_and_the_time_in_wall_seconds(tmp_path) -> None:
    run = Federation(2).run(tmp_path / "run", rounds=2)
    [facts] = json.loads((tmp_path / "run" / "summary.json").read_text())["facts"]
    assert sorted(one["name"] for one in facts["cohort"]) == ["c0", "c1"]
    assert all(one["machine"]["engine"] == "loop" for one in facts["cohort"])
    assert {client for client, *_ in facts["there"]} == {0, 1}
    assert all(began <= ended for _, began, ended in facts["there"])
    for step in run.history.steps:
        assert step.numbers is not None
        assert step.numbers["wall_seconds"] > 0
        assert "virtual_seconds" not in step.numbers
