"""What clients measure one by one is what one would have said of all."""

from __future__ import annotations

import math

from dure.protocol.messages import EvaluationResults, merge_evaluations

ALL = EvaluationResults(
    [0, 2, 5],
    {"client_loss": [1.0, 2.0, 3.0], "newest_f1": [0.5, math.nan, 0.25]},
    {"client_loss": [3, 4, 5], "newest_f1": [1, 0, 2]},
    {"client_loss": [[3.0, 3.0], [8.0, 4.0], [15.0, 5.0]], "newest_f1": [[1.0], [], [2.0]]},
    {"client_loss": "", "newest_f1": "[1]"},
    {1: "it has no examples to measure with", 2: "the metric 'f1' failed"},
)


def alone(client: int) -> EvaluationResults:
    """What this client says of itself."""
    place = ALL.clients.index(client)
    mine = [name for name in ALL.values if ALL.examples[name][place]]
    return EvaluationResults(
        [client],
        {name: [ALL.values[name][place]] for name in mine},
        {name: [ALL.examples[name][place]] for name in mine},
        {name: [ALL.sums[name][place]] for name in mine},
        {name: ALL.forms[name] for name in mine},
        {key: reason for key, reason in ALL.failures.items() if key == client},
    )


def same(one: EvaluationResults, other: EvaluationResults) -> bool:
    # NaN is equal to nothing, and has a text.
    return str(one) == str(other)


def test_the_order_in_which_clients_answer_changes_nothing() -> None:
    nothing = EvaluationResults([], {}, failures={1: ALL.failures[1]})
    assert same(merge_evaluations([alone(5), nothing, alone(0), alone(2)]), ALL)
    assert same(merge_evaluations([ALL]), ALL)
    assert same(merge_evaluations([]), EvaluationResults([], {}))


def test_sums_of_two_forms_are_not_added() -> None:
    other = EvaluationResults(
        [7], {"newest_f1": [1.0]}, {"newest_f1": [1]}, {"newest_f1": [[1.0]]}, {}
    )
    without = EvaluationResults([8], {"client_loss": [1.0]}, {"client_loss": [1]})
    found = merge_evaluations([ALL, other, without])
    assert found.sums == {}
    assert found.values["client_loss"][-1] == 1.0
    assert found.clients == [0, 2, 5, 7, 8]
