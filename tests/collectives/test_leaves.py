"""Tensors that travel piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks, values
from torch import Tensor

from dure.collectives import tensor_transfer
from dure.contracts.world import RankContext
from dure.memory.spill_store import SpillStore
from dure.record.disk_tensors import Leaf, forms_of, in_memory

KINDS = [torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.bool, torch.int64]


def mine(rank: int) -> dict[str, Tensor]:
    """Some of every kind, empty ones and single numbers among them; each rank has more of them."""
    found = {
        f"{number} {dtype}": values(7 * number * (rank + 1), rank, dtype)
        for number, dtype in enumerate(KINDS)
    }
    return {
        **found,
        "number": torch.tensor(rank),
        "table": values(12, rank, torch.float32).view(3, 4),
    }


def same(found: dict[str, Leaf], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        in_memory(found[name]).dtype == one.dtype and torch.equal(in_memory(found[name]), one)
        for name, one in wanted.items()
    )


@pytest.mark.parametrize("least", [None, 1])
def test_all_arrive_whole_however_small_the_pieces_are(least: int | None) -> None:
    def program(context: RankContext) -> list[Any]:
        group = context.group
        tensor_transfer.PIECE = 40
        shelf = SpillStore(least=least)
        sent = group.meter.counters.bytes_sent
        parts = tensor_transfer.gathered(group, mine(group.rank), shelf.place)
        told = mine(0) if group.rank == 0 else {}
        whole = tensor_transfer.broadcast(group, told, forms_of(mine(0)), shelf.place)
        return [
            [same(part, mine(rank)) for rank, part in enumerate(parts)],
            same(whole, mine(0)),
            group.meter.counters.bytes_sent - sent,
        ]

    first, *others = on_ranks(3, program)
    assert first == [[True] * 3, True, 0]
    assert others == [[[], True, 0]] * 2


def test_a_message_is_no_longer_than_a_piece_and_small_tensors_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_transfer, "PIECE", 40)
    forms = forms_of({"a": torch.zeros(3), "b": torch.zeros(33), "c": torch.zeros(2).double()})
    messages = tensor_transfer._messages(forms)
    sizes = [sum(run.nbytes for run in message) for message in messages]
    assert max(sizes) <= 40
    assert sum(sizes) == 4 * 36 + 16
    assert len(messages) == 4
    assert [run.form.name for run in messages[0]] == ["a", "b"]
