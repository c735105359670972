"""Gather by every algorithm to every root, and scatter, its inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Measured, measured, on_ranks, values
from torch import Tensor

from dure.collectives import Group, gather, scatter
from dure.collectives.gather import ALGORITHMS, elements_sent, messages_sent
from dure.collectives.scatter import elements_sent as scattered_elements
from dure.collectives.scatter import messages_sent as scattered_messages
from dure.contracts.world import RankContext


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.integers(1, 8),
    lengths=st.lists(st.integers(0, 60), min_size=2, max_size=4),
    data=st.data(),
)
def test_what_is_gathered_is_every_ranks_and_scattered_comes_back(
    ranks: int, lengths: list[int], data: st.DataObject
) -> None:
    roots = [data.draw(st.integers(0, ranks - 1)) for _ in lengths]
    cases = [(name, n, root) for name in ALGORITHMS for n, root in zip(lengths, roots, strict=True)]

    def program(context: RankContext) -> list[tuple[Measured, Measured]]:
        def both(name: str, n: int, root: int) -> tuple[Measured, Measured]:
            mine = values(2 * n, context.group.rank, torch.float32).view(n, 2)
            there = measured(context.group, lambda: gather(mine, context.group, root, name))  # type: ignore[call-overload]
            back = torch.zeros(2, n).t()  # not contiguous
            return there, measured(
                context.group, lambda: scatter(back, there.value, context.group, root, name)
            )  # type: ignore[call-overload]

        return [both(*case) for case in cases]

    per_rank = on_ranks(ranks, program)
    for position, (name, n, root) in enumerate(cases):
        everything = torch.stack(
            [values(2 * n, rank, torch.float32).view(n, 2) for rank in range(ranks)]
        )
        for rank in range(ranks):
            there, back = per_rank[rank][position]
            assert torch.equal(there.value, everything) if rank == root else there.value is None
            assert torch.equal(back.value, everything[rank])
            total = 2 * n * ranks
            assert there.sent == 4 * elements_sent(total, ranks, rank, root, name)  # type: ignore[arg-type]
            assert there.messages == messages_sent(total, ranks, rank, root, name)  # type: ignore[arg-type]
            assert back.sent == 4 * scattered_elements(total, ranks, rank, root, name)  # type: ignore[arg-type]
            assert back.messages == scattered_messages(total, ranks, rank, root, name)  # type: ignore[arg-type]


def test_beside_the_program() -> None:
    def program(context: RankContext) -> tuple[Tensor | None, float]:
        gathered = gather(torch.tensor(context.group.rank), context.group, async_op=True).wait()
        return gathered, scatter(
            torch.zeros(()), torch.tensor([5.0, 6.0]), context.group, async_op=True
        ).wait().item()

    (first, five), (second, six) = on_ranks(2, program)
    assert first is not None
    assert (first.tolist(), second, five, six) == ([0, 1], None, 5.0, 6.0)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no gather 'tree'; choose one of linear, native"):
        gather(torch.ones(1), algorithm="tree")  # type: ignore[call-overload]
    with pytest.raises(
        ValueError, match="there is no scatter 'tree'; choose one of linear, native"
    ):
        scatter(torch.ones(1), algorithm="tree")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="the root of a scatter needs a source"):
        scatter(torch.ones(1), None, Group())
    with pytest.raises(
        ValueError, match=r"this scatter is \(3, 4\) of torch.float32, but 1 ranks with \(4,\)"
    ):
        scatter(torch.ones(4), torch.ones(3, 4), Group())
    with pytest.raises(ValueError, match="root is 2"):
        gather(torch.ones(1), root=2)
