"""A client never processes more samples in a round than its server takes for possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.data.batches import Batches
from dure.federated.client.jobs import LocalWork
from dure.federated.engines.job import ClientJob
from dure.federated.engines.plan import batches


@given(
    examples=st.integers(1, 60),
    batch_size=st.none() | st.integers(2, 20),
    epochs=st.integers(1, 4),
    steps=st.none() | st.integers(1, 9),
    turn=st.integers(0, 5),
    joins=st.booleans(),
)
def test_no_engine_processes_more_than_the_most(
    examples: int, batch_size: int | None, epochs: int, steps: int | None, turn: int, joins: bool
) -> None:
    if joins and examples < 2:
        return
    # A server need not know whether the model takes single examples; its clients do.
    most = LocalWork(epochs, steps, batch_size).most_samples(examples)
    count = LocalWork(epochs, steps, batch_size, joins).steps_of(examples)
    first = turn * count
    job = ClientJob(0, 0, torch.arange(examples), [], [], first, count, joins=joins)
    _, sizes = batches(job, batch_size, 0)
    assert sum(sizes) <= most
    # As the engine of Per-FedAvg takes them: any of the batches, one a step.
    drawn = Batches(examples, batch_size, 0, 0, joins)
    assert sum(len(drawn.at(3 * (first + step) + 1)) for step in range(count)) <= most


@pytest.mark.parametrize(("batch_size", "epochs", "most"), [(None, 3, 36), (4, 2, 30), (5, 1, 18)])
def test_the_most_is_of_the_order_of_the_passes(
    batch_size: int | None, epochs: int, most: int
) -> None:
    assert LocalWork(epochs, None, batch_size).most_samples(12) == most
