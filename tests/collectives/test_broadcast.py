"""Broadcast by every algorithm from every root."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Measured, bits, measured, on_ranks, values

from dure.collectives import Group, broadcast
from dure.collectives.broadcast import ALGORITHMS, elements_sent, messages_sent
from dure.contracts.world import RankContext

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.uint16, torch.complex64]


def dtype_of(name: str, n: int) -> torch.dtype:
    """Any of them; gloo's own broadcast does not know all."""
    return DTYPES[n % (3 if name == "native" else 6)]


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.integers(1, 8),
    lengths=st.lists(st.integers(0, 100), min_size=2, max_size=4),
    data=st.data(),
)
def test_every_rank_has_the_roots_tensor(
    ranks: int, lengths: list[int], data: st.DataObject
) -> None:
    roots = [data.draw(st.integers(0, ranks - 1)) for _ in lengths]
    cases = [(name, n, root) for name in ALGORITHMS for n, root in zip(lengths, roots, strict=True)]

    def program(context: RankContext) -> list[Measured]:
        def call(name: str, n: int, root: int) -> bytes:
            dtype = dtype_of(name, n)
            return bits(broadcast(values(n, context.group.rank, dtype), context.group, root, name))  # type: ignore[call-overload]

        return [measured(context.group, lambda c=case: call(*c)) for case in cases]  # type: ignore[misc]

    per_rank = on_ranks(ranks, program)
    for position, (name, n, root) in enumerate(cases):
        dtype = dtype_of(name, n)
        for rank in range(ranks):
            value, sent, messages = per_rank[rank][position]
            assert value == bits(values(n, root, dtype))
            assert sent == elements_sent(n, ranks, rank, root, name) * dtype.itemsize  # type: ignore[arg-type]
            assert messages == messages_sent(n, ranks, rank, root, name)  # type: ignore[arg-type]


@given(n=st.integers(1, 50), size=st.integers(1, 20), root=st.integers(0, 19))
def test_all_algorithms_deliver_as_much(n: int, size: int, root: int) -> None:
    for name in ALGORITHMS:
        total = sum(elements_sent(n, size, rank, root % size, name) for rank in range(size))  # type: ignore[arg-type]
        assert total == (size - 1) * n


def test_a_tensor_that_is_not_contiguous_is_filled_in_its_place() -> None:
    def program(context: RankContext) -> list[list[float]]:
        base = torch.zeros(2, 4)
        broadcast(base[:, ::2].add_(context.group.rank), context.group, 1)
        return base.tolist()

    assert on_ranks(2, program) == [[[1, 0, 1, 0]] * 2] * 2


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(
        ValueError, match="there is no broadcast 'ring'; choose one of tree, linear, native"
    ):
        broadcast(torch.ones(1), algorithm="ring")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="root is 1, but the ranks of the group are 0 to 0"):
        broadcast(torch.ones(1), Group(), 1)
    assert broadcast(torch.ones(1), async_op=True).wait().item() == 1
