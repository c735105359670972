"""A model's embeddings on a few rows: what they ask for, give, and learn."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.parameter_server.embeddings import Tables, check_no_tables, tables_of
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.tables import SparseRows
from small import small_task

OFFSETS = torch.tensor([0, 3], dtype=torch.int32)


def call(module: Any, ids: Tensor) -> Tensor:
    """A bag takes offsets and weights of its own besides."""
    if isinstance(module, nn.Embedding):
        result: Tensor = module(ids)
        return result
    weights = torch.arange(1.0, len(ids) + 1, dtype=torch.float64)
    own = weights if module.mode == "sum" else None
    found: Tensor = module(ids, OFFSETS, per_sample_weights=own)
    return found


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize(
    "kind",
    [
        nn.Embedding,
        partial(nn.EmbeddingBag, mode="sum"),
        partial(nn.EmbeddingBag, mode="mean"),
    ],
    ids=["embedding", "sum", "mean"],
)
def test_rows_that_were_pulled_do_what_the_whole_table_does(kind: Any, padding: int | None) -> None:
    whole = kind(9, 2, sparse=True, padding_idx=padding).double()
    model = nn.Sequential(kind(9, 2, sparse=True, padding_idx=padding).double())
    model.load_state_dict({"0.weight": whole.weight.detach().clone()})
    ids = torch.tensor([7, 3, 7, 0, 5], dtype=torch.int32)
    shards = [KeyRange(0, 0, 4), KeyRange(0, 4, 9)]
    task: dure.Task = small_task(model=lambda: model)
    tables = Tables(model, tables_of(task, model, 0), shards)
    forward = partial(call, model[0], ids)
    wanted = tables.by_shard(tables.asked(forward))
    assert [rows.tolist() for rows in wanted] == [[0] if padding else [0, 3], [5, 7]]
    values = [SparseRows(rows, whole.weight.detach()[rows]) for rows in wanted]
    with tables.holding(values) as gradients:
        found = forward()
        (found.square().sum()).backward()
        learned = gradients()
    expected = call(whole, ids)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    dense = torch.zeros(9, 2, dtype=torch.float64)
    for one in learned:
        assert one is not None
        dense[one.rows] = one.values
    torch.testing.assert_close(dense, whole.weight.grad.to_dense())
    # Outside of it, there is no number.
    assert bool(call(model[0], ids).isnan().any())
    with tables.reading([lambda rows: whole.weight.detach()[rows]] * 2):
        torch.testing.assert_close(forward(), expected)


def test_systems_without_tables_name_them() -> None:
    check_no_tables(nn.Embedding(3, 2))
    with pytest.raises(ValueError, match=r"0\.weight is a sparse embedding, which this"):
        check_no_tables(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
