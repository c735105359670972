"""What clients say of a model: what cannot be right is not taken."""

from __future__ import annotations

import pytest

from dure.federated.server.by_client import fit
from dure.protocol.messages import Measured


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
    assert fit(Measured(clients, values), 3).values == kept
