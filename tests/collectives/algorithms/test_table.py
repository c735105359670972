"""The list of all-reduces is whole, and one of somebody's own is used as those in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from on_ranks import Measured, measured, on_ranks
from torch import Tensor

from dure.collectives import Group, all_reduce
from dure.collectives.algorithms import master, table
from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.algorithms.auto import candidates
from dure.collectives.algorithms.table import ALL_REDUCES, PREDICTABLE
from dure.collectives.all_reduce import ALGORITHMS
from dure.collectives.operation import SUM, Reduction
from dure.contracts.world import RankContext


def test_every_file_that_declares_an_all_reduce_is_listed_under_its_name() -> None:
    files = Path(table.__file__).parent.glob("*.py")
    declaring = {file.stem for file in files if "\nALL_REDUCE = AllReduce(" in file.read_text()}
    assert declaring == set(ALL_REDUCES)
    assert [*ALL_REDUCES, "auto"] == list(ALGORITHMS)


def test_what_is_predictable_is_compared() -> None:
    assert candidates(8) == [name for name in PREDICTABLE if name != "hierarchical"]
    assert candidates(8, [[0, 1, 2, 3], [4, 5, 6, 7]]) == list(PREDICTABLE)
    assert "native" not in PREDICTABLE


def through_the_last(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """As `master`, through the last rank instead of the first."""
    last = group.size - 1
    master.reduce(flat, group, reduction, last)
    master.broadcast(flat, group, last)


MINE = AllReduce(
    name="through_the_last",
    all_reduce=through_the_last,
    elements_sent=lambda n, size, rank: n * (size - 1 if rank == size - 1 else 1),
    messages_sent=lambda n, size, rank: size - 1 if rank == size - 1 else 1,
    rounds=lambda size: 2 * (size - 1),
)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_all_reduce_of_ones_own_is_given_as_it_is(ranks: int) -> None:
    def program(context: RankContext) -> Measured:
        tensor = torch.full((5,), context.group.rank + 1.0)
        return measured(
            context.group, lambda: all_reduce(tensor, context.group, MINE, "avg").tolist()
        )

    for rank, (value, sent, messages) in enumerate(on_ranks(ranks, program)):
        assert value == [(ranks + 1) / 2] * 5
        if ranks > 1:
            assert sent == 4 * MINE.elements_sent(5, ranks, rank)
            assert messages == MINE.messages_sent(5, ranks, rank)
