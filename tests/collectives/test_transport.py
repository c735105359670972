"""What carries the bytes: torch's own calls where a process group brings nothing along, and its own
transport where it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from dure.collectives import Group
from dure.collectives.transport import TorchTransport, Transport, own_transport, transport_of
from dure.contracts.world import RankContext


def test_a_single_rank_has_a_transport_that_carries_nothing() -> None:
    alone = transport_of(None)
    assert type(alone) is Transport
    assert not alone.holds(1, 1)
    assert not alone.reaches(torch.device("cpu"))
    with pytest.raises(NotImplementedError):
        alone.post(torch.ones(1), 0)


def test_over_torch_the_answer_is_no_to_all_but_messages() -> None:
    def program(context: RankContext) -> list[Any]:
        carrier = context.group.transport
        peer = 1 - context.group.rank
        into = torch.zeros(3)
        posted = carrier.post(torch.full((3,), float(context.group.rank)), peer)
        carrier.fetch(into, peer)
        assert posted is not None
        posted.wait()
        carrier.meet()
        answers = (
            carrier.begins_reductions,
            carrier.apart,
            carrier.split_phase,
            carrier.holds(1, 1),
            carrier.averages(torch.device("cpu")),
            carrier.reaches(torch.device("cpu")),
        )
        return [type(carrier) is TorchTransport, into.tolist(), any(answers)]

    assert on_ranks(2, program) == [[True, [1.0] * 3, False], [True, [0.0] * 3, False]]


def test_a_process_group_of_our_own_brings_its_transport_along() -> None:
    def program(context: RankContext) -> list[bool]:
        made = dist.new_group(backend="dure")
        carrier = Group(made).transport
        answers = [
            carrier is own_transport(made),
            own_transport(context.group.process_group) is None,
            carrier.begins_reductions,
            carrier.averages(torch.device("cpu")),
            not carrier.apart,
        ]
        dist.destroy_process_group(made)
        return answers

    assert on_ranks(2, program) == [[True] * 5] * 2


def test_places_in_a_group_of_some_ranks_are_its_own() -> None:
    def program(context: RankContext) -> float | None:
        made = dist.new_group([1, 2], backend="dure")
        if context.group.rank == 0:
            return None
        group = Group(made)
        into = torch.zeros(1)
        group.exchange(torch.full((1,), float(group.rank)), 1 - group.rank, into, 1 - group.rank)
        return into.item()

    assert on_ranks(3, program) == [None, 1.0, 0.0]
