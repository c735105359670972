"""All-to-all by every algorithm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Measured, measured, on_ranks

from dure.collectives import Group, all_to_all
from dure.collectives.all_to_all import ALGORITHMS, elements_sent, messages_sent
from dure.contracts.world import RankContext


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(ranks=st.integers(1, 8), rows=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_rows_go_to_their_ranks_and_come_in_order_of_rank(ranks: int, rows: list[int]) -> None:
    cases = [(name, k) for name in ALGORITHMS for k in rows]

    def program(context: RankContext) -> list[Measured]:
        def call(name: str, k: int) -> object:
            mine = 100 * context.group.rank + torch.arange(context.group.size).repeat_interleave(k)
            return all_to_all(torch.stack([mine, -mine]).t(), context.group, name).tolist()  # type: ignore[call-overload]

        return [measured(context.group, lambda c=case: call(*c)) for case in cases]  # type: ignore[misc]

    for rank, results in enumerate(on_ranks(ranks, program)):
        for (name, k), (value, sent, messages) in zip(cases, results, strict=True):
            column = [100 * source + rank for source in range(ranks) for _ in range(k)]
            assert value == [[number, -number] for number in column]
            assert sent == 8 * elements_sent(2 * k * ranks, ranks, rank, name)  # type: ignore[arg-type]
            assert messages == messages_sent(2 * k * ranks, ranks, rank, name)  # type: ignore[arg-type]


def test_rows_that_cannot_be_divided_are_refused_before_anything_travels() -> None:
    def program(context: RankContext) -> str:
        with pytest.raises(ValueError, match="ranks needs a multiple of 2 rows") as caught:
            all_to_all(torch.ones(3, 2), context.group)
        return str(caught.value)

    assert (
        on_ranks(2, program) == ["an all-to-all of 2 ranks needs a multiple of 2 rows, not 3"] * 2
    )
    with pytest.raises(ValueError, match="not no"):
        all_to_all(torch.ones(()), Group())
    with pytest.raises(
        ValueError, match="there is no all-to-all 'ring'; choose one of pairwise, native"
    ):
        all_to_all(torch.ones(1), algorithm="ring")  # type: ignore[call-overload]
