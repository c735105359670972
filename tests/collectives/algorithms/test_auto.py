"""What `auto` chooses, and that all ranks choose the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import measured, on_ranks

import dure
from dure.collectives import all_reduce
from dure.collectives.algorithms.auto import candidates, choose
from dure.collectives.algorithms.table import ALL_REDUCES
from dure.contracts.world import RankContext

TWO_HOSTS = [[0, 1, 2, 3], [4, 5, 6, 7]]
KiB = 1024


@pytest.mark.parametrize(
    ("nbytes", "ranks", "options", "expected"),
    [
        (10 * KiB, 1, {}, "native"),
        (10 * KiB, 4, {"backend": "dure"}, "native"),
        (10 * KiB, 4, {"backend": "dure", "device": "cuda"}, "one_shot"),
        (10 * KiB, 4, {"backend": "nccl", "device": "cuda"}, "native"),
        (64 * KiB, 8, {}, "one_shot"),
        (64 * KiB + 1, 8, {}, "halving_doubling"),
        (2 * KiB, 9, {}, "tree"),
        (2 * KiB + 1, 9, {}, "halving_doubling"),
        (512 * KiB, 6, {}, "halving_doubling"),
        (512 * KiB + 1, 6, {}, "ring"),
        (512 * KiB + 1, 8, {}, "halving_doubling"),
        (2 * KiB, 8, {"hosts": TWO_HOSTS}, "one_shot"),
        (2 * KiB + 1, 8, {"hosts": TWO_HOSTS}, "hierarchical"),
        (600 * KiB, 3, {"hosts": [[0], [1], [2]]}, "ring"),
        (600 * KiB, 3, {"hosts": [[0, 1, 2]]}, "ring"),
        (600 * KiB, 8, {"predict": lambda name, nbytes, ranks: len(name)}, "ring"),
        (
            600 * KiB,
            8,
            {"hosts": TWO_HOSTS, "predict": lambda name, nbytes, ranks: -len(name)},
            "halving_doubling",
        ),
    ],
)
def test_the_switch_points(nbytes: int, ranks: int, options: dict[str, Any], expected: str) -> None:
    assert choose(nbytes, ranks, **options) == expected


@given(nbytes=st.integers(0, 2**40), ranks=st.integers(1, 1_000))
def test_the_choice_is_an_algorithm_that_there_is(nbytes: int, ranks: int) -> None:
    assert choose(nbytes, ranks) in ALL_REDUCES
    assert set(candidates(ranks, [list(range(ranks))])) <= ALL_REDUCES.keys()


def test_auto_sends_what_its_choice_sends() -> None:
    def program(context: RankContext) -> list[int]:
        lengths = (100, 50_000, 200_000)
        return [
            measured(
                context.group, lambda n=n: all_reduce(torch.ones(n), context.group, "auto")
            ).sent
            for n in lengths
        ]  # type: ignore[misc]

    for rank, sent in enumerate(on_ranks(3, program)):
        expected = {100: "one_shot", 50_000: "halving_doubling", 200_000: "ring"}
        assert [choose(4 * n, 3) for n in expected] == list(expected.values())
        assert sent == [
            4 * ALL_REDUCES[name].elements_sent(n, 3, rank) for n, name in expected.items()
        ]


def test_given_hosts_and_a_cost_model_are_asked() -> None:
    def program(context: RankContext) -> list[int]:
        hosts = [[0, 1], [2]]
        first = measured(
            context.group, lambda: all_reduce(torch.ones(3_000), context.group, "auto", hosts=hosts)
        )
        model = lambda name, nbytes, ranks: float(name != "master")  # noqa: E731
        second = measured(
            context.group,
            lambda: all_reduce(torch.ones(3_000), context.group, "auto", predict=model),
        )
        return [first.sent, second.sent]

    hierarchical, master = ALL_REDUCES["hierarchical"], ALL_REDUCES["master"]
    for rank, sent in enumerate(on_ranks(3, program)):
        expected = [
            hierarchical.elements_sent(3_000, 3, rank, [[0, 1], [2]]),
            master.elements_sent(3_000, 3, rank),
        ]
        assert sent == [4 * elements for elements in expected]


def test_on_the_shared_memory_of_dure_it_is_the_backends_own() -> None:
    def program(context: RankContext) -> tuple[float, int, int]:
        result, sent, messages = measured(
            context.group, lambda: all_reduce(torch.ones(1_000), context.group, "auto")
        )
        return result[0].item(), sent, messages

    world = dure.Processes(2, deadline=20, backend="dure")
    assert world.run(program, lambda event: None) == (
        2.0,
        4 * ALL_REDUCES["native"].elements_sent(1_000, 2, 0),
        1,
    )
