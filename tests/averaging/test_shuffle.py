"""The shuffle: who gets which example, that it is what is trained on, its bytes and messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounds import run_on
from torch import Tensor
from torch.utils.data import Dataset

import dure
from dure.averaging import shuffle
from dure.averaging.shuffle import (
    ExampleLayout,
    bytes_sent,
    examples_sent,
    messages_sent,
    outgoing_positions,
    shuffle_counts,
    shuffle_examples,
)
from dure.collectives.algorithms import ring
from dure.contracts.world import RankContext
from small import EXAMPLES, FEATURES, same_bits, small_task

BORN = dure.LabelShards(1)
EXAMPLE = 8 * FEATURES + 8
"""Bytes of an example of the small task: its inputs in float64, and a label."""


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(0, 5))
def test_every_example_goes_to_one_rank_and_every_rank_gets_its_share_of_each(
    counts: list[int], seed: int
) -> None:
    ranks, n = len(counts), sum(counts)
    for rank, (count, row) in enumerate(zip(counts, shuffle_counts(counts), strict=True)):
        parts = outgoing_positions(counts, rank, seed)
        assert [len(part) for part in parts] == row
        assert torch.cat(parts).sort().values.tolist() == list(range(count))
        assert all(count // ranks <= got <= -(-count // ranks) for got in row)
        if count % ranks == 0:
            assert examples_sent(counts, rank) * ranks == count * (ranks - 1)
    totals = [sum(column) for column in zip(*shuffle_counts(counts), strict=True)]
    assert all(n // ranks <= total <= -(-n // ranks) for total in totals)


def shuffled_indices(parts: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Indices of each rank's examples after the shuffle, computed without messages."""
    counts = list(map(len, parts))
    positions = [outgoing_positions(counts, rank, seed) for rank in range(len(counts))]
    return [
        torch.cat([part[sent[to]] for part, sent in zip(parts, positions, strict=True)])
        for to in range(len(counts))
    ]


def test_who_gets_an_example_is_drawn_by_the_seed() -> None:
    parts = [torch.arange(20), torch.arange(20, 40)]
    first, again, other = (shuffled_indices(parts, seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again != other


PARTS = [torch.arange(0, 40, 2), torch.arange(1, 9, 2), torch.arange(9, 41, 2)]
"""Of 40 examples, as three ranks have them at first: 20, 4 and 16."""


def several() -> dure.Examples:
    """Inputs and targets in several tensors of several dtypes, of which one has no elements."""
    numbers = torch.arange(40)
    inputs = {
        "half": (numbers[:, None] / torch.tensor([1.0, 3.0, 7.0])).half(),
        "mask": numbers[:, None] % torch.tensor([[2, 3]]) == 0,
        "nothing": torch.empty(40, 0),
    }
    return dure.Examples(inputs, (numbers, torch.complex(numbers.double(), numbers.double() / 3)))


def exchange(context: RankContext) -> list[Any]:
    """What each rank received, sent, and is told where examples differ."""
    shuffle.PIECE = 100  # a part is several messages
    rank, counts = context.group.rank, list(map(len, PARTS))
    got = shuffle_examples(several(), PARTS[rank], counts, 5, context.group)
    counters = context.group.meter.counters
    received = got.batch(torch.arange(len(got)))
    told = [
        counters.bytes_sent == bytes_sent(counts, rank, ExampleLayout.of(got).nbytes),
        counters.messages_sent == messages_sent(counts, rank, ExampleLayout.of(got)),
        _same(received, several().batch(shuffled_indices(PARTS, 5)[rank])),
    ]
    shuffle.available_memory = lambda: 0  # what arrives lies on a disk
    again = shuffle_examples(several(), PARTS[rank], counts, 5, context.group)
    told.append(_same(received, again.batch(torch.arange(len(got)))))
    alike = dure.Examples(torch.zeros(40, 2 + (rank == 1)), torch.zeros(40))
    with pytest.raises(ValueError, match="examples of rank 1 differ from those of rank"):
        shuffle_examples(alike, PARTS[rank], counts, 5, context.group)
    parts = context.group.gather_bytes(bytes(told))
    return [list(map(bool, part)) for part in parts]


def _same(first: Any, second: Any) -> bool:
    pairs = zip(
        torch.utils._pytree.tree_leaves(first),
        torch.utils._pytree.tree_leaves(second),
        strict=True,
    )
    return all(torch.equal(mine, other) for mine, other in pairs)


def test_what_arrives_is_what_was_dealt_and_costs_what_the_formula_says() -> None:
    told = dure.Processes(3).run(exchange, lambda event: None)
    assert told == [[True] * 4] * 3


def rearranged() -> dure.Task:
    """The small task with its examples in the order of the ranks they are born on, and owned by
    those that have them after the shuffle."""
    train = small_task().train
    born = list(BORN.divide(3, train, 3))
    order = torch.cat(born)
    owners = torch.empty(EXAMPLES, dtype=torch.int64)
    for rank, part in enumerate(shuffled_indices(born, 3)):
        owners[part] = rank
    return small_task(train=dure.Examples(*train.batch(order), keys=owners[order].tolist()))


@pytest.mark.parametrize("combine_every", [None, 2])
def test_a_shuffled_run_is_one_on_the_division_that_the_shuffle_makes(
    combine_every: int | None, tmp_path: Path
) -> None:
    mixed = dure.ParallelSGD(12, partition=BORN, shuffle=True, combine_every=combine_every)
    run_on(small_task(), mixed, 3, rounds=1, out=tmp_path / "run")
    # Interrupted and gone on with: the exchange is done again, and costs nothing more.
    run = dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(rounds=3))
    whole = run_on(small_task(), mixed, 3, rounds=3)
    given = dure.ParallelSGD(12, partition=dure.NaturalKey(), combine_every=combine_every)
    assert same_bits(run, whole)
    assert same_bits(run, run_on(rearranged(), given, 3, rounds=3))
    counts = [len(part) for part in BORN.divide(3, small_task().train)]
    combinations = 3 if combine_every else 1
    for one in (run, whole):
        for rank, worker in enumerate(one.summary["per_worker"]):
            moved = bytes_sent(counts, rank, EXAMPLE)
            average = 8 * ring.elements_sent(one.summary["parameters"], 3, rank)
            assert worker["shuffle_bytes"] == moved
            assert worker["bytes_sent"] == moved + combinations * average
            assert worker["shuffle_seconds"] > 0
        assert one.summary["shuffle_bytes"] == sum(
            worker["shuffle_bytes"] for worker in one.summary["per_worker"]
        )


def test_examples_that_lie_with_their_ranks_travel_from_there(tmp_path: Path) -> None:
    data = rearranged().train
    counts = [len(part) for part in BORN.divide(3, small_task().train)]
    for rank, (inputs, targets) in enumerate(
        zip(data.inputs.split(counts), data.targets.split(counts), strict=True)
    ):
        (tmp_path / str(rank)).mkdir()
        numpy.save(tmp_path / str(rank) / "0.inputs.npy", inputs)
        numpy.save(tmp_path / str(rank) / "0.targets.npy", targets)

    def in_memory(rank: int, world: int) -> Any:
        return data.inputs.split(counts)[rank], data.targets.split(counts)[rank]

    def on_disk(rank: int, world: int) -> Any:
        return dure.Shards(tmp_path / str(rank), window=4)

    given = dure.ParallelSGD(12, partition=dure.NaturalKey())
    wanted = run_on(rearranged(), given, 3, rounds=2)
    for own in (in_memory, on_disk):
        run = run_on(small_task(train=own), dure.ParallelSGD(12, shuffle=True), 3, rounds=2)
        assert same_bits(run, wanted)
        assert run.summary["shuffle_bytes"] == sum(
            bytes_sent(counts, rank, EXAMPLE) for rank in range(3)
        )


class Drawn(Dataset[Any]):
    """Examples that are other ones at every reading."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(FEATURES), index % 3


def test_what_is_read_anew_each_time_is_not_sent() -> None:
    task = small_task(train=Drawn())
    with pytest.raises(ValueError, match="shuffle sends examples as tensors"):
        run_on(task, dure.ParallelSGD(4, shuffle=True), 2, rounds=1)
