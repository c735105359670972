"""Where a model is cut, and where it must not be."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dure.parallel.pipeline.aliasing import changed_by
from dure.parallel.pipeline.balance import (
    SLACK,
    SPEED,
    WORK_OF_AN_ELEMENT,
    Costs,
    best_starts,
    costs_of,
    crossing_bytes,
)
from dure.parallel.pipeline.program import crossing, stages_of
from dure.parallel.pipeline.trace import ModelTrace


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    n = draw(st.integers(3, 9))
    own = draw(st.lists(st.floats(0, 10), min_size=n, max_size=n))
    return Costs(
        tuple(own), tuple(draw(st.lists(st.integers(0, 100), min_size=n, max_size=n))), 0.05
    )


@settings(max_examples=60)
@given(costs(), st.integers(1, 3))
def test_no_other_cut_has_a_cheaper_dearest_stage(case: Costs, stages: int) -> None:
    n = len(case.own)

    def dearest(starts: tuple[int, ...]) -> float:
        ends = [*starts, n]
        leaving = [case.link * case.crossing[end] for end in starts] + [0.0]
        return max(
            sum(case.own[a:b]) + c for a, b, c in zip([0, *starts], ends, leaving, strict=True)
        )

    cuts = list(combinations(range(1, n), stages - 1))
    best = min(map(dearest, cuts))
    found = tuple(best_starts(case, stages))
    assert dearest(found) <= SLACK * best + 1e-9

    def sent(cut: tuple[int, ...]) -> float:
        return sum(case.crossing[place] for place in cut)

    close = [cut for cut in cuts if dearest(cut) <= SLACK * best]
    assert sent(found) <= min(map(sent, close)) + 1e-9


class Products(nn.Module):
    """Products of values with weights, with others, and with themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Conv2d(1, 3, 3)
        self.within = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.within(self.seen(images).flatten(2).view(-1, 6, 6))
        rows = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        alike = rows @ rows
        scores: Tensor = self.out(torch.baddbmm(rows, alike, rows.softmax(-1)))
        return scores


class Squared(nn.Module):
    """Products of a value with itself alone."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(inputs, inputs, inputs) @ torch.bmm(
            inputs, inputs
        )


@pytest.mark.parametrize(("model", "shape"), [(Squared(), (2, 5, 5)), (Products(), (2, 1, 8, 6))])
def test_what_operations_are_estimated_to_cost_are_all_their_products(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    inputs = torch.randn(*shape)
    trace = ModelTrace(model, inputs)
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    numbers = sum(node.meta["val"].numel() for node in trace.stage_operations)
    seconds = sum(costs_of(trace, "estimated", [inputs]).own)
    assert seconds * SPEED / 3 - WORK_OF_AN_ELEMENT * numbers == pytest.approx(
        counter.get_total_flops()
    )


class Writing(nn.Module):
    """Writes into a view, into its inputs, and into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.add_(1)
        hidden = self.norm(self.first(inputs))
        rows = torch.zeros_like(hidden)
        rows[:, :2] = hidden[:, :2]
        self.seen = self.seen + 1
        scores: Tensor = self.last(rows.relu_()) + inputs
        return scores


def test_what_changes_memory_is_settled() -> None:
    trace = ModelTrace(Writing().train(), torch.randn(3, 4))
    values = chain.from_iterable(map(changed_by, trace.operations))
    roots = {trace.root[value] for value in values}
    changed = {trace.names[root] for root in roots if root in trace.names}
    assert changed == {"seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert not any(node.op == "placeholder" for node in trace.changed), (
        "inputs are copied before they change"
    )
    zeros = next(node for node in trace.stage_operations if "zeros" in str(node.target))
    assert trace.value(zeros).differentiable, "a gradient goes through what is written into them"
    (view,) = [
        changed_by(node)[0]
        for node in trace.stage_operations
        if changed_by(node) and "slice" in str(changed_by(node)[0])
    ]
    assert trace.stage_operations.index(view) + 1 in trace.inseparable


def test_bytes_that_cross_are_those_of_the_messages() -> None:
    trace = ModelTrace(Writing().train(), torch.randn(3, 4))
    at = crossing_bytes(trace)
    for place in range(1, len(trace.stage_operations)):
        if place not in trace.inseparable:
            (values,) = crossing(trace, stages_of(trace, [place]), 2)
            assert sum(trace.value(node).nbytes for node in values) == at[place]
