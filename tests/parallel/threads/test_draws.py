"""A thread's own random numbers are those that the global generator would have given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _python_dispatch

import dure
from dure.parallel.threads.thread_rng import ThreadDraws, thread_generators
from small import FEATURES, small_task

CPU = torch.device("cpu")
X = torch.ones(6, 8, requires_grad=True)

OPERATORS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout of channels": lambda: nn.Dropout2d(0.4)(torch.ones(2, 3, 4, 4)),
    "rand": lambda: torch.rand(5),
    "rand_like": lambda: torch.rand_like(X),
    "randperm": lambda: torch.randperm(9),
    "in place": lambda: torch.empty(4).normal_(),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 5),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.3),
    "lstm": lambda: nn.LSTM(8, 4, 2, dropout=0.5)(torch.ones(3, 2, 8))[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_numbers_are_those_of_the_seed_and_the_global_generator_stays(name: str) -> None:
    torch.manual_seed(12)
    expected = [OPERATORS[name]() for _ in range(2)]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    with thread_generators(12, [CPU]):
        drawn = [OPERATORS[name]() for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_the_user_gives_is_the_users() -> None:
    with thread_generators(1, [CPU]):
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(7))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_a_pass_is_repeated_once_when_it_is_found_to_draw_and_leaves_no_trace() -> None:
    model = nn.Module()
    model.register_buffer("written", torch.zeros(1))
    model.register_buffer("replaced", torch.zeros(1))
    model.register_buffer("none", None)
    draws = ThreadDraws([CPU], [model])
    passes: list[float] = []

    def work(own: Callable[[int], object], random: bool) -> None:
        model.written.add_(1)  # type: ignore[operator,union-attr]
        model.replaced = model.replaced + 1  # type: ignore[operator]
        assert torch.equal(model.get_buffer("written"), model.replaced)
        passes.append(float(model.replaced))
        with own(3):  # type: ignore[attr-defined]
            if random:
                torch.rand(1)

    before = torch.get_rng_state()
    draws.run(lambda own: work(own, False))
    assert (passes, draws.found) == ([1], False)
    draws.run(lambda own: work(own, True))
    assert (passes, draws.found) == ([1, 2, 2], True)
    draws.run(lambda own: work(own, True))
    assert passes == [1, 2, 2, 3]
    assert torch.equal(torch.get_rng_state(), before)


def test_where_threads_have_drawn_torch_knows_that_none_does_any_more() -> None:
    task = small_task(
        model=lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Dropout(), nn.Dropout(), nn.Linear(8, 3)
        ).double()
    )
    for _ in range(3):
        dure.train(task, dure.LayersPerCore(8, 4), dure.Threads(4), dure.Stop(steps=8))
        assert not [
            name
            for name, value in vars(_python_dispatch).items()
            if name.startswith("_is_in_") and value
        ]
