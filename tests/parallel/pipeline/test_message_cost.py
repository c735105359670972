"""Messages of a pipeline that take longer than the work between them."""

from __future__ import annotations

from typing import Any

import pytest

import dure
from dure.cli.running import note_on_messages
from dure.parallel.pipeline.message_cost import (
    StepCosts,
    cost_facts,
    slow_message_note,
    step_costs,
)
from small import small_task


def rank(compute: float, message: float, microbatches: int = 8, stages: int = 2) -> dict[str, Any]:
    costs = {"compute": compute, "message": message, "microbatches": microbatches}
    return {"stages": [{}] * stages, "step_costs": costs}


def test_layers_of_microseconds_get_a_note_with_both_times() -> None:
    note = slow_message_note([rank(20e-6, 150e-6), rank(30e-6, 170e-6)])
    assert note is not None
    assert "a message takes 0.16 ms" in note
    assert "computes a micro-batch in 0.025 ms" in note
    assert "fewer stages a rank" in note
    assert note_on_messages([rank(20e-6, 150e-6)]) == (
        f"pipeline: {slow_message_note([rank(20e-6, 150e-6)])}"
    )


def test_a_single_stage_a_rank_has_no_fewer_stages() -> None:
    note = slow_message_note([rank(20e-6, 150e-6, stages=1)])
    assert note is not None
    assert "stages a rank" not in note


@pytest.mark.parametrize(
    "facts",
    [
        [rank(20e-3, 150e-6), rank(30e-3, 170e-6)],
        # The naive schedule sends fewest messages already.
        [rank(20e-6, 150e-6, microbatches=1, stages=1)],
        [],
        [{"stages": [{}, {}]}],
        [{"stages": [{}, {}], "step_costs": None}],
        [{"stages": [{}, {}], "step_costs": {"compute": "a"}}],
    ],
)
def test_large_layers_and_other_runs_get_no_note(facts: list[dict[str, Any]]) -> None:
    assert slow_message_note(facts) is None
    assert note_on_messages(facts) is None


def test_the_costs_of_a_step_are_means_and_the_shortest_wait() -> None:
    # A longer wait is for the neighbour's work.
    assert step_costs([1.0, 3.0], [0.25, 0.75], [4.0, 0.5]) == StepCosts(2.0, 1.0)
    assert step_costs([1.0], [], [0.5]) == StepCosts(1.0, 0.5)
    assert step_costs([1.0], [], []) is None
    assert step_costs([], [1.0], [1.0]) is None


def test_the_first_step_counts_only_if_it_is_the_only_one() -> None:
    steps = [StepCosts(9.0, 9.0), StepCosts(1.0, 2.0), StepCosts(3.0, 4.0), StepCosts(2.0, 3.0)]
    assert cost_facts(steps, 4) == {"compute": 2.0, "message": 3.0, "microbatches": 4}
    assert cost_facts(steps[:1], 4) == {"compute": 9.0, "message": 9.0, "microbatches": 4}
    assert cost_facts([], 4) is None


def test_a_run_measures_its_messages_and_its_work() -> None:
    strategy = dure.Pipeline(batch_size=8, microbatches=2, schedule="gpipe")
    run = dure.train(small_task(), strategy, dure.Processes(2), dure.Stop(steps=4))
    facts = run.summary["facts"]
    assert len(facts) == 2
    for one in facts:
        assert one["step_costs"]["compute"] > 0
        assert one["step_costs"]["message"] > 0
        assert one["step_costs"]["microbatches"] == 2
    means = {
        name: sum(one["step_costs"][name] for one in facts) / 2 for name in ("compute", "message")
    }
    slower = means["message"] > means["compute"]
    assert (slow_message_note(facts) is not None) == slower
