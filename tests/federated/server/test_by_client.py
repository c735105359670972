"""What clients say of a model: what cannot be right is not taken."""

from __future__ import annotations

import pytest

import dure
from dure.federated.server.client_metrics import LONGEST, ClientMeasurements, valid_measurements
from dure.protocol.messages import EvaluationResults


@pytest.mark.parametrize(
    ("clients", "values", "kept"),
    [
        ([0, 2], {"loss": [1.0, 2.0]}, {"loss": [1.0, 2.0]}),
        ([0, 2], {"loss": [1.0], "accuracy": [0.5, 0.6]}, {"accuracy": [0.5, 0.6]}),
        ([0, 3], {"loss": [1.0, 2.0]}, {}),
        ([-1, 2], {"loss": [1.0, 2.0]}, {}),
        ([1, 1], {"loss": [1.0, 2.0]}, {}),
        ([], {"loss": []}, {}),
    ],
)
def test_a_number_for_each_of_the_clients_that_there_are(
    clients: list[int], values: dict[str, list[float]], kept: dict[str, list[float]]
) -> None:
    assert valid_measurements(EvaluationResults(clients, values), 3).values == kept


def test_what_clients_tell_besides_is_taken_where_it_can_be_right() -> None:
    said = EvaluationResults(
        [0, 2],
        {"client_loss": [1.0, 2.0], "client_accuracy": [0.5, 0.6]},
        examples={"client_loss": [3, -1], "client_accuracy": [3, 4], "other": [1, 1]},
        sums={"client_loss": [[1.0, 2.0], [3.0]], "client_accuracy": [[1.0, 2.0], [3.0, 5.0]]},
        forms={"client_accuracy": ""},
        failures={1: "a\nline\x1b[31m" + "x" * 1_000, 3: "nobody"},
    )
    kept = valid_measurements(said, 3)
    assert kept.examples == {"client_accuracy": [3, 4]}
    assert kept.sums == {"client_accuracy": [[1.0, 2.0], [3.0, 5.0]]}
    (reason,) = kept.failures.values()
    assert reason.startswith("a line [31mxxx")
    assert len(reason) == LONGEST


@pytest.mark.parametrize(
    "form", ["", "[2]", "[-1]", '{"dict":1}', "[3000000000]", "no", "[" * 9_999]
)
@pytest.mark.parametrize(
    "sums", [[[1.0, 2.0], [3.0, 5.0]], [[1.0], [2.0]], [[1e400, 1.0], [1.0, 1.0]]]
)
def test_sums_of_anybody_never_raise(form: str, sums: list[list[float]]) -> None:
    metric = dure.SumMetric(lambda outputs, targets: targets, lambda total: total[5])
    said = EvaluationResults(
        [0, 1],
        {"client_f1": [0.25, 0.75]},
        {"client_f1": [1, 3]},
        {"client_f1": sums},
        {"client_f1": form},
    )
    found = ClientMeasurements({"f1": metric}).take(valid_measurements(said, 2))
    assert found["client_f1"] == 0.625
