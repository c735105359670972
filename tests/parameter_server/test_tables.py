"""A table at the server against torch: what it comes to, what it holds, what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dure.parameter_server.tables import (
    EmbeddingTable,
    SparseRows,
    TableRows,
    joined,
    rule_of,
    summed,
)

ROWS, DIM = 12, 3
SGD = partial(torch.optim.SGD, lr=0.1)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.2, lr_decay=0.01, initial_accumulator_value=0.1)
ADAM = partial(torch.optim.SparseAdam, lr=0.05, betas=(0.8, 0.95))
FIRST = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def table(optimizer: Any) -> EmbeddingTable:
    weight = nn.Parameter(FIRST.clone())
    made = optimizer([weight])
    rule = rule_of(type(made), made.param_groups[0], "emb.weight")
    return EmbeddingTable("emb.weight", ROWS, DIM, torch.float64, rule, lambda rows: FIRST[rows])


def updates(draws: list[list[int]]) -> list[SparseRows]:
    """Gradients of these rows, of which each leaves a mark of its own."""
    return [
        SparseRows(
            torch.tensor(rows, dtype=torch.int64),
            torch.sin(torch.arange(len(rows) * DIM, dtype=torch.float64) + 3 * step).view(-1, DIM),
        )
        for step, rows in enumerate(draws)
    ]


DRAWS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=8), min_size=1, max_size=12)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ADAM])
@given(draws=DRAWS, cut=st.integers(1, ROWS - 1))
@settings(max_examples=40, deadline=None)
def test_it_equals_torch_whatever_the_rows_and_the_servers(
    optimizer: Any, draws: list[list[int]], cut: int
) -> None:
    weight = nn.Parameter(FIRST.clone())
    oracle = optimizer([weight])
    parts = [TableRows(table(optimizer), 0, cut), TableRows(table(optimizer), cut, ROWS)]
    for rows, gradient in updates(draws):
        weight.grad = torch.sparse_coo_tensor(
            rows[None], gradient, (ROWS, DIM), check_invariants=False
        )
        oracle.step()
        for part in parts:
            own = (part.start <= rows) & (rows < part.stop)
            part.push(rows[own], gradient[own])
    found = torch.cat([part.pull(torch.arange(part.start, part.stop)) for part in parts])
    torch.testing.assert_close(found, weight.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("optimizer", [SGD, partial(ADAGRAD, eps=1e-6)])
@given(draws=DRAWS)
@settings(max_examples=30, deadline=None)
def test_sgd_and_adagrad_equal_a_dense_parameter_to_the_bit(
    optimizer: Any, draws: list[list[int]]
) -> None:
    weight = nn.Parameter(FIRST.clone())
    oracle = optimizer([weight])
    part = TableRows(table(optimizer), 0, ROWS)
    for given_rows in updates(draws):
        rows, gradient = summed(given_rows)
        weight.grad = torch.zeros(ROWS, DIM, dtype=torch.float64)
        weight.grad[rows] = gradient
        oracle.step()
        part.push(rows, gradient)
    assert torch.equal(part.pull(torch.arange(ROWS)), weight.detach())


@given(draws=DRAWS, after=st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_a_copy_goes_on_to_the_same_bits(draws: list[list[int]], after: int) -> None:
    part = TableRows(table(ADAM), 0, ROWS)
    for step, (rows, gradient) in enumerate(updates(draws)):
        if step == after:
            copy = TableRows(table(ADAM), 0, ROWS)
            copy.restore(part.state())
            part = copy
        part.push(rows, gradient)
    whole = TableRows(table(ADAM), 0, ROWS)
    for rows, gradient in updates(draws):
        whole.push(rows, gradient)
    everything = torch.arange(ROWS)
    assert torch.equal(part.pull(everything), whole.pull(everything))
    assert part.changed.rows.tolist() == whole.changed.rows.tolist()


def test_only_rows_that_were_changed_have_memory() -> None:
    made: list[int] = []

    def first(rows: Tensor) -> Tensor:
        made.append(len(rows))
        return torch.ones(len(rows), 4)

    rule = rule_of(torch.optim.SGD, {"lr": 0.5}, "emb.weight")
    rows = 2**30
    part = TableRows(EmbeddingTable("emb.weight", rows, 4, torch.float32, rule, first), 0, rows)
    assert part.pull(torch.tensor([0, rows - 1])).tolist() == [[1.0] * 4] * 2
    assert part.count == 0
    part.push(torch.tensor([7, rows - 1]), torch.ones(2, 4))
    assert part.count == 2
    assert len(part.state()["values"]) == 2
    assert part.pull(torch.tensor([7, 8])).tolist() == [[0.5] * 4, [1.0] * 4]
    assert max(made) == 2


def test_workers_are_joined_in_their_order_whatever_rows_they_have() -> None:
    first = SparseRows(torch.tensor([1, 4]), torch.tensor([[1.0], [2.0]]))
    second = SparseRows(torch.tensor([4, 4, 0]), torch.tensor([[10.0], [20.0], [5.0]]))
    rows, values = joined([first, second], [0.5, 0.1])
    assert rows.tolist() == [0, 1, 4]
    torch.testing.assert_close(values, torch.tensor([[0.5], [0.5], [4.0]]))


def test_rows_of_another_range_are_refused() -> None:
    part = TableRows(table(SGD), 3, 6)
    part.check(torch.tensor([3, 5]))
    with pytest.raises(ValueError, match=r"rows 2 to 5 are not all of emb\.weight's rows 3 to 5"):
        part.check(torch.tensor([5, 2]))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (partial(SGD, momentum=0.9), "SGD has momentum=0.9"),
        (partial(SGD, weight_decay=0.1), "SGD has weight_decay=0.1"),
        (torch.optim.AdamW, "AdamW has weight_decay"),
        (partial(torch.optim.AdamW, weight_decay=0), "AdamW does not support sparse rows"),
        (partial(torch.optim.Adam, amsgrad=True), "Adam has amsgrad=True"),
        (torch.optim.RMSprop, "RMSprop does not support sparse rows"),
        (partial(torch.optim.Adam, lr=torch.tensor(0.1)), "has to be a number"),
    ],
)
def test_optimizers_that_rows_cannot_have_are_refused_by_name(optimizer: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        table(optimizer)
