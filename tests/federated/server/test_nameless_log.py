"""What is remembered of a run in which nobody is to know who took part."""

from __future__ import annotations

import json

from dure.federated.server.combining import RoundResult
from dure.federated.server.log import Log
from dure.protocol.carrier import AssignmentRecord


def told(names: bool) -> Log:
    log = Log(None, names=names)
    flown = [
        AssignmentRecord(41, 0, 0.0, 1.0, "accepted", 10, 10, 0.5, 0.5),
        AssignmentRecord(43, 0, 0.0, 2.0, "dropped out", 10, 0, 0.5, 0.5),
    ]
    result = RoundResult(0.5, 7, [41], [0], {3: "it is not finite"}, [43])
    log.flew(flown, result)
    return log


def test_a_log_without_names_counts_and_says_of_nobody_that_it_was_there() -> None:
    log = told(names=False)
    facts = log.facts()
    assert facts["outcomes"] == {"accepted": 1, "dropped out": 1}
    assert facts["refusals"] == {"it is not finite": 1}
    for written in (facts, log.state()):
        text = json.dumps(written)
        assert "41" not in text
        assert "43" not in text
    # With names it says so, which is what makes this a test.
    assert "41" in json.dumps(told(names=True).facts())


def test_a_log_without_names_stays_so_when_a_run_goes_on() -> None:
    log = Log(None, names=False)
    log.restore(told(names=False).state())
    log.flew(
        [AssignmentRecord(41, 1, 3.0, 4.0, "accepted", 1, 1, 0.1, 0.1)],
        RoundResult(0.1, 1, [41], [0], {}, []),
    )
    assert "41" not in json.dumps(log.facts())
