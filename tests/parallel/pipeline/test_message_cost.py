"""Messages of a pipeline that take longer than the work between them."""

from __future__ import annotations

from typing import Any

import pytest

import dure
from dure.cli.running import note_on_messages
from dure.parallel.pipeline.builders import make
from dure.parallel.pipeline.message_cost import (
    StepCosts,
    cost_facts,
    message_cost,
    slow_message_note,
)
from small import small_task


def facts_of(
    compute: float, message: float, name: str = "interleaved", microbatches: int = 8, v: int = 2
) -> list[dict[str, Any]]:
    """Return the facts of two ranks whose computations and messages take these seconds."""
    schedule = make(name, 2, microbatches, v)
    received = max(
        sum(action.kind.startswith("receive") for action in actions) for actions in schedule.actions
    )
    # The duration of these schedules in computations (docs/pipeline.md), forward and backward.
    simulated = 2 * (v * microbatches + 1) * compute
    costs = {"compute": compute, "step": simulated + received * message, "messages": received}
    ranks: list[dict[str, Any]] = [
        {"at": {"data": 0, "pipeline": rank, "tensor": 0}, "step_costs": costs} for rank in range(2)
    ]
    ranks[0]["schedule"] = schedule.text()
    return ranks


def test_layers_of_microseconds_get_a_note_with_both_times() -> None:
    facts = facts_of(25e-6, 160e-6)
    cost = message_cost(facts)
    assert cost is not None
    assert cost == pytest.approx((25e-6, 160e-6))
    note = slow_message_note(facts)
    assert note is not None
    assert "a message adds 0.16 ms" in note
    assert "computes a micro-batch in 0.025 ms" in note
    assert "fewer stages a rank" in note
    assert note_on_messages(facts) == f"pipeline: {note}"


def test_a_single_stage_a_rank_has_no_fewer_stages() -> None:
    note = slow_message_note(facts_of(25e-6, 160e-6, "gpipe", v=1))
    assert note is not None
    assert "stages a rank" not in note


def without(facts: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name != key} for one in facts]


@pytest.mark.parametrize(
    "facts",
    [
        facts_of(20e-3, 150e-6),
        # The naive schedule sends fewest messages already.
        facts_of(20e-6, 150e-6, "naive", 1, 1),
        [],
        facts_of(25e-6, 160e-6)[:1],
        without(facts_of(25e-6, 160e-6), "schedule"),
        without(facts_of(25e-6, 160e-6), "step_costs"),
        [{**one, "step_costs": None} for one in facts_of(25e-6, 160e-6)],
        [{**one, "schedule": "damaged"} for one in facts_of(25e-6, 160e-6)],
    ],
)
def test_large_layers_and_other_runs_get_no_note(facts: list[dict[str, Any]]) -> None:
    assert slow_message_note(facts) is None
    assert note_on_messages(facts) is None


def test_the_first_step_counts_only_if_it_is_the_only_one() -> None:
    steps = [StepCosts(9.0, 9.0, 4), *(StepCosts(n, 2 * n, 4) for n in (1.0, 3.0, 2.0))]
    assert cost_facts(steps) == {"compute": 2.0, "step": 4.0, "messages": 4}
    assert cost_facts(steps[:1]) == {"compute": 9.0, "step": 9.0, "messages": 4}
    assert cost_facts([]) is None


def test_a_run_measures_its_messages_and_its_work() -> None:
    strategy = dure.Pipeline(batch_size=8, microbatches=2, schedule="gpipe")
    run = dure.train(small_task(), strategy, dure.Processes(2), dure.Stop(steps=4))
    facts = run.summary["facts"]
    assert [one["step_costs"]["messages"] for one in facts] == [2, 2]
    for one in facts:
        assert one["step_costs"]["step"] > one["step_costs"]["compute"] > 0
    cost = message_cost(facts)
    assert cost is not None
    assert (slow_message_note(facts) is not None) == (cost.message > cost.compute)
