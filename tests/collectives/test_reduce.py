"""Reduce by every algorithm to every root."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Measured, measured, on_ranks, values
from torch import Tensor

from dure.collectives import reduce
from dure.collectives.reduce import ALGORITHMS, elements_sent, messages_sent
from dure.contracts.world import RankContext


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.integers(1, 8),
    lengths=st.lists(st.integers(0, 100), min_size=2, max_size=4),
    data=st.data(),
)
def test_the_root_has_the_sum_and_the_others_keep_theirs(
    ranks: int, lengths: list[int], data: st.DataObject
) -> None:
    roots = [data.draw(st.integers(0, ranks - 1)) for _ in lengths]
    cases = [(name, n, root) for name in ALGORITHMS for n, root in zip(lengths, roots, strict=True)]

    def program(context: RankContext) -> list[Measured]:
        def call(name: str, n: int, root: int) -> Tensor:
            return reduce(values(n, context.group.rank, torch.int64), context.group, root, name)  # type: ignore[call-overload, no-any-return]

        return [measured(context.group, lambda c=case: call(*c)) for case in cases]  # type: ignore[misc]

    per_rank = on_ranks(ranks, program)
    for position, (name, n, root) in enumerate(cases):
        total = torch.stack([values(n, rank, torch.int64) for rank in range(ranks)]).sum(0)
        for rank in range(ranks):
            value, sent, messages = per_rank[rank][position]
            assert torch.equal(value, total if rank == root else values(n, rank, torch.int64)), name
            assert sent == 8 * elements_sent(n, ranks, rank, root, name)  # type: ignore[arg-type]
            assert messages == messages_sent(n, ranks, rank, root, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_average_changes_nobody_but_the_root(dtype: torch.dtype) -> None:
    def program(context: RankContext) -> list[list[float]]:
        mine = torch.full((3,), float(context.group.rank), dtype=dtype)
        return [
            reduce(mine.clone(), context.group, 1, name, "avg").tolist()
            for name in ("tree", "linear")
        ]  # type: ignore[call-overload]

    averages = on_ranks(3, program)
    assert averages == [[[float(rank)] * 3] * 2 for rank in range(3)]


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(
        ValueError, match="there is no reduce 'master'; choose one of tree, linear, native"
    ):
        reduce(torch.ones(1), algorithm="master")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="root is -1"):
        reduce(torch.ones(1), root=-1)
    with pytest.raises(ValueError, match=r"the average of torch\.int64"):
        reduce(torch.ones(1, dtype=torch.int64), op="avg")
    assert reduce(torch.ones(1), async_op=True).wait().item() == 1
