"""All-gather and reduce-scatter by every algorithm: alone, and as the two halves of an
all-reduce."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Measured, measured, on_ranks, values
from torch import Tensor

from dure.collectives import Group, all_gather, reduce_scatter
from dure.collectives.all_gather import ALGORITHMS, elements_sent, messages_sent
from dure.collectives.reduce_scatter import elements_sent as scattered_elements
from dure.collectives.reduce_scatter import messages_sent as scattered_messages
from dure.contracts.world import RankContext


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(ranks=st.integers(1, 8), lengths=st.lists(st.integers(0, 100), min_size=2, max_size=5))
def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce(
    ranks: int, lengths: list[int]
) -> None:
    cases = [(name, n) for name in ALGORITHMS for n in lengths]

    def program(context: RankContext) -> list[tuple[Tensor, Measured, Measured]]:
        def both(name: str, n: int) -> tuple[Tensor, Measured, Measured]:
            mine = values(n, context.group.rank, torch.int64)
            scattered = measured(context.group, lambda: reduce_scatter(mine, context.group, name))  # type: ignore[call-overload]
            whole = measured(
                context.group, lambda: all_gather(scattered.value, context.group, name, n)
            )  # type: ignore[call-overload]
            return mine, scattered, whole

        return [both(*case) for case in cases]

    per_rank = on_ranks(ranks, program)
    for position, (name, n) in enumerate(cases):
        total = torch.stack([values(n, rank, torch.int64) for rank in range(ranks)]).sum(0)
        for rank in range(ranks):
            mine, scattered, whole = per_rank[rank][position]
            assert torch.equal(mine, values(n, rank, torch.int64)), "the input is not changed"
            assert torch.equal(scattered.value, total.tensor_split(ranks)[rank]), name
            assert torch.equal(whole.value, total), name
            assert scattered.sent == 8 * scattered_elements(n, ranks, rank, name)  # type: ignore[arg-type]
            assert scattered.messages == scattered_messages(n, ranks, rank, name)  # type: ignore[arg-type]
            assert whole.sent == 8 * elements_sent(n, ranks, rank, name)  # type: ignore[arg-type]
            assert whole.messages == messages_sent(n, ranks, rank, name)  # type: ignore[arg-type]


def test_tensors_of_any_shape_are_stacked() -> None:
    def program(context: RankContext) -> list[Tensor]:
        mine = torch.arange(6.0).view(2, 3).t() + 10 * context.group.rank
        scalar = torch.tensor(context.group.rank)
        calls = [
            all_gather(part, context.group, name) for name in ALGORITHMS for part in (mine, scalar)
        ]  # type: ignore[call-overload]
        return [*calls, all_gather(scalar, context.group, async_op=True).wait()]

    expected = torch.stack([torch.arange(6.0).view(2, 3).t() + 10 * rank for rank in range(3)])
    for results in on_ranks(3, program):
        assert all(torch.equal(result, expected) for result in results[:-1:2])
        assert all(result.tolist() == [0, 1, 2] for result in [*results[1::2], results[-1]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_an_average_is_scattered_and_the_input_kept(dtype: torch.dtype) -> None:
    def program(context: RankContext) -> list[tuple[list[float], list[float]]]:
        mine = torch.full((5,), 3.0 * context.group.rank, dtype=dtype)
        names = ["ring", "one_shot"]
        return [
            (reduce_scatter(mine, context.group, name, "avg").tolist(), mine.tolist())
            for name in names
        ]  # type: ignore[call-overload]

    for rank, results in enumerate(on_ranks(3, program)):
        assert results == [([3.0] * len(range(5)[rank::3]), [3.0 * rank] * 5)] * 2


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(
        ValueError, match="there is no all-gather 'tree'; choose one of ring, one_shot, native"
    ):
        all_gather(torch.ones(1), algorithm="tree")  # type: ignore[call-overload]
    with pytest.raises(
        ValueError, match="there is no reduce-scatter 'tree'; choose one of ring, one_shot, native"
    ):
        reduce_scatter(torch.ones(1), algorithm="tree")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="rank 0 of 1 holds 5 of 5 elements, not 3"):
        all_gather(torch.ones(3), Group(), n=5)
    with pytest.raises(ValueError, match=r"the average of torch\.bool"):
        reduce_scatter(torch.ones(1).bool(), op="avg")
