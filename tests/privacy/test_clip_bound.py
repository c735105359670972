"""No example adds more than the clip, whatever its numbers are; plain autograd is the judge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dure.privacy.per_example import layers
from dure.privacy.per_example.clipping import PerExampleClipping, norm_bounds
from dure.privacy.per_example.functional import FunctionalClipping
from dure.privacy.per_example.ghost import GhostClipping
from dure.privacy.per_example.looped import LoopClipping
from dure.privacy.per_example.losses import losses_of

WAYS = {"ghost": GhostClipping, "functional": FunctionalClipping, "looped": LoopClipping}
LARGE = 1.001
"""Of the clip: the digits of float32."""


class Pooled(nn.Module):
    """Gradients of the scores sum to 0 over positions, so that those of weights cancel."""

    def __init__(self, layer: nn.Module, wide: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(wide, 2, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        scores = self.layer(values)
        scores = scores - scores.mean(1, keepdim=True)
        return self.head(scores.tanh().abs().mean(1))


class Along(nn.Module):
    """A convolution over positions, which come second."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(64, 64, 3, padding=1, bias=False, groups=groups)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values.mT).mT


class Weighted(nn.Module):
    """Rows of an embedding by weights that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, values: Tensor) -> Tensor:
        weights = values.sum(-1, keepdim=True)
        weights = weights - weights.mean(1, keepdim=True)
        return self.head(
            (self.table(torch.zeros(values.shape[:2], dtype=torch.long)) * weights).sum(1)
        )


KINDS = {
    "linear": lambda: Pooled(nn.Linear(64, 64, bias=False), 64),
    "bias": lambda: Pooled(nn.Linear(64, 3), 3),
    "convolution": lambda: Pooled(Along(1), 64),
    "groups": lambda: Pooled(Along(4), 64),
    "layer norm": lambda: Pooled(nn.LayerNorm(64), 64),
    "embedding": Weighted,
    "one position": lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(64, 2, bias=False)),
}


def length(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def differing(
    kind: str, positions: int, scale: float, seed: int
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and six examples, of which the first has a large offset at all positions."""
    torch.manual_seed(seed)
    model = KINDS[kind]()
    inputs = torch.randn(6, 1 if kind == "one position" else positions, 64)
    inputs[0] = inputs[0] * min(scale, 1.0) + scale * torch.randn(64)
    return model, inputs, torch.randint(0, 2, (6,))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    exponent=st.integers(-22, 12),
    positions=st.sampled_from([2, 5, 33]),
    clip=st.sampled_from([1e-3, 0.1, 10.0]),
    seed=st.integers(0, 99),
)
def test_an_example_adds_no_more_than_the_clip(
    way: str, kind: str, exponent: int, positions: int, clip: float, seed: int
) -> None:
    model, inputs, targets = differing(kind, positions, 10.0**exponent, seed)
    way_of: PerExampleClipping = WAYS[way](model, losses_of(F.cross_entropy)[0])
    alone = way_of.clipped(inputs[:1], targets[:1], clip)
    whole = way_of.clipped(inputs, targets, clip)
    others = way_of.clipped(inputs[1:], targets[1:], clip)
    # What is not finite ends the run.
    if bool(alone.norms.isfinite().all()):
        assert length(alone.sums) <= clip * LARGE
        moved = [one.double() - other for one, other in zip(whole.sums, others.sums, strict=True)]
        assert length(moved) <= clip * LARGE


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_never_below_those_of_autograd_in_float64_and_close_to_them(kind: str) -> None:
    model, inputs, targets = differing(kind, 5, 1.0, 0)
    exact = KINDS[kind]().double()
    exact.load_state_dict({name: one.double() for name, one in model.state_dict().items()})
    told = (
        GhostClipping(model, losses_of(F.cross_entropy)[0]).clipped(inputs, targets, math.inf).norms
    )
    for at, norm in enumerate(told.tolist()):
        loss = F.cross_entropy(exact(inputs[at : at + 1].double()), targets[at : at + 1])
        true = length(torch.autograd.grad(loss, list(exact.parameters())))
        # Below it by the rounding of forward and backward alone.
        assert true * (1 - 1e-5) <= norm <= true * (1 + 2e-3)


@settings(max_examples=60, deadline=None)
@given(
    elements=st.sampled_from([1, 3, 1023, 1024, 1025, 5000]),
    exponent=st.integers(-45, 18),
    seed=st.integers(0, 99),
)
def test_norm_bounds_are_upper_bounds_also_where_squares_are_lost(
    elements: int, exponent: int, seed: int
) -> None:
    rows = torch.randn(3, elements, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    exact = rows.double().norm(dim=1)
    told = norm_bounds(rows)
    assert bool((told >= exact).all())
    # Squares of larger norms are infinite in float32, and so may the bound be.
    kept = exact < 1e19
    assert bool((told <= exact * (1 + 1e-4) + 1e-16)[kept].all())


def test_cancelling_products_of_small_and_large_numbers_are_not_lost() -> None:
    given_ = torch.full((1, 4, 64), 1e-23)
    outgoing = torch.full((1, 4, 64), 1e23)
    outgoing[:, 2:] *= -0.5
    exact = float((outgoing.double().mT @ given_.double()).norm())
    assert float(layers.gram_norms(given_, outgoing)) >= exact
