"""Which examples a step takes, alone and in a cohort."""

from __future__ import annotations

import torch
from clients_at_work import jobs_of
from hypothesis import given
from hypothesis import strategies as st

from dure.data.batches import Batches
from dure.federated.engines.plan import batches, plan

SIZES = st.none() | st.integers(1, 12)


@given(st.integers(1, 20), SIZES, st.integers(0, 9), st.integers(1, 9), st.integers(0, 3))
def test_the_batches_are_those_that_everybody_visits(n, batch_size, first, steps, seed):
    (job,) = jobs_of([n], [steps], [], first_step=first)
    order, sizes = batches(job, batch_size, seed)
    own = Batches(n, batch_size, seed, 0)
    expected = [job.indices[own.at(step)] for step in range(first, first + steps)]
    assert [batch.tolist() for batch in torch.split(order, sizes)] == [
        batch.tolist() for batch in expected
    ]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=6), SIZES)
def test_a_cohort_s_rows_are_the_batches_of_its_clients_and_the_rest_weighs_nothing(
    clients, batch_size
):
    jobs = jobs_of([n for n, _ in clients], [steps for _, steps in clients], [])
    made = plan(jobs, batch_size, 7)
    assert sorted(made.by_steps) == list(range(len(jobs)))
    for place, which in enumerate(made.by_steps):
        own = Batches(len(jobs[which].indices), batch_size, 7, which)
        visited = [
            (step.rows[place], step.shares[place]) for step in made.steps if place < len(step.sizes)
        ]
        assert len(visited) == jobs[which].steps
        for at, (rows, shares) in enumerate(visited):
            batch = jobs[which].indices[own.at(jobs[which].first_step + at)]
            assert sorted(rows[shares > 0].tolist()) == sorted(
                batch.tolist()
            )  # the order inside a batch is nobody's
            assert set(rows.tolist()) == set(
                batch.tolist()
            )  # padding is the client's own: it cannot do harm
            assert torch.allclose(
                shares[shares > 0] * len(batch), torch.ones(len(batch), dtype=torch.float64)
            )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 10))
def test_only_an_epoch_s_last_batches_waste_rows(sizes, batch_size):
    jobs = jobs_of(sizes, [-(-n // batch_size) for n in sizes], [], first_step=0)
    wasted = sum(step.rows.numel() for step in plan(jobs, batch_size, 0).steps) - sum(sizes)
    assert 0 <= wasted <= sum(-n % batch_size for n in sizes)
