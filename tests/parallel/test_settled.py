"""What is drawn inside is the same everywhere, forward and backward, and is noted."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from dure.parallel.deterministic_draws import DeterministicDraws


def test_dropout_keeps_all_and_its_gradient_too() -> None:
    inputs = torch.rand(3, 4, requires_grad=True)
    with DeterministicDraws() as settled:
        dropped = F.dropout(inputs, 0.3)
        dropped.sum().backward()
    assert torch.equal(dropped, inputs)
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, torch.ones(3, 4))
    ((shape, _, _),) = settled.drawn
    assert shape == (3, 4)


def test_attention_drops_nothing() -> None:
    query = torch.rand(1, 2, 5, 4)
    with DeterministicDraws():
        mixed = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    torch.testing.assert_close(mixed, F.scaled_dot_product_attention(query, query, query))


def test_every_kind_of_draw_gives_one_value() -> None:
    with DeterministicDraws():
        drawn = [
            torch.rand(4),
            torch.randn(4),
            torch.empty(4).uniform_(2, 3),
            torch.empty(4).normal_(1, 2),
            torch.bernoulli(torch.full((4,), 0.2)),
            torch.empty(4, dtype=torch.bool).bernoulli_(0.2),
            torch.empty(4).exponential_(),
            torch.randint(3, 9, (4,)),
            torch.randint(9, (4,)),
            torch.rand_like(torch.zeros(4)),
        ]
        order = torch.randperm(4)
    assert [tensor.unique().tolist() for tensor in drawn] == [
        *([0.5], [0.5], [2.5], [2.0], [torch.tensor(0.2).item()], [True], [1.0], [3], [0], [0.5]),
    ]
    assert order.tolist() == [0, 1, 2, 3]


def test_each_draw_is_noted_with_its_module_and_the_generators_seed() -> None:
    class Noisy(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs + torch.randn_like(inputs)

    with DeterministicDraws() as settled:
        for seed in (3, 4):
            torch.default_generator.manual_seed(seed)
            Noisy()(torch.zeros(2))
    assert settled.drawn == [((2,), 3, "a Noisy"), ((2,), 4, "a Noisy")]


def test_the_coarsest_dtype_is_noted() -> None:
    layer = nn.Linear(4, 4).double()
    with DeterministicDraws() as settled:
        layer(torch.zeros(2, 4, dtype=torch.float64))
        assert settled.computed_in == torch.float64
        layer.float()(torch.zeros(2, 4))
        assert settled.computed_in == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.zeros(2, 4))
    assert settled.computed_in == torch.bfloat16
