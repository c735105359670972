"""Divided linear layers beside undivided ones, and what travels between them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from divided import at_all_degrees, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.parallel.tensor import ColumnParallel, RowParallel, per_rank_draws
from dure.parallel.tensor import functions as between
from dure.parallel.tensor.division import Division, sharers

CLOSE = 1e-10


class Shape(NamedTuple):
    """blocks: of the first layer's outputs, in parts of a rank."""

    batch: int
    length: int
    inputs: int
    blocks: tuple[int, ...]
    outputs: int
    bias: bool
    transposed: bool
    sequence: bool
    overlap: bool


SHAPES = st.builds(
    Shape,
    batch=st.integers(1, 3),
    length=st.integers(1, 3),
    inputs=st.integers(1, 7),
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    outputs=st.integers(1, 6),
    bias=st.booleans(),
    transposed=st.booleans(),
    sequence=st.booleans(),
    overlap=st.booleans(),
)


def pair(shape: Shape, group: Group) -> float:
    """How far divided layers are from what they divide, all of their gradients included."""
    size = group.size
    rank = group.rank
    blocks = [block * size for block in shape.blocks]
    hidden = sum(blocks)
    generator = torch.Generator().manual_seed(5)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    first = draw(hidden, shape.inputs)
    second = draw(shape.outputs, hidden)
    biases = (draw(hidden), draw(shape.outputs)) if shape.bias else (None, None)
    inputs = draw(shape.batch, shape.length * size, shape.inputs).requires_grad_()
    weights = [each.requires_grad_() for each in (first, second, *biases) if each is not None]
    outputs = F.linear(torch.tanh(F.linear(inputs, first, biases[0])), second, biases[1])
    outputs.square().sum().backward()

    stored = [
        each.detach().t().clone() if shape.transposed else each.detach().clone()
        for each in (first, second)
    ]
    for each in stored:
        each.requires_grad_()
    how: dict[str, Any] = {
        "transposed": shape.transposed,
        "sequence": 1 if shape.sequence else None,
    }
    column = ColumnParallel(
        stored[0], biases[0], group, blocks=blocks, overlap=shape.overlap, **how
    )
    row = RowParallel(stored[1], biases[1], group, **how)
    row_division = Division(0 if shape.transposed else 1, tuple(blocks))
    with torch.no_grad():  # its inputs come in the order of the column's blocks
        row.weight.copy_(row_division.part(stored[1], rank, size))
    own = inputs.detach().clone()
    own = own.chunk(size, 1)[rank].clone() if shape.sequence else own
    own.requires_grad_()
    found = row(torch.tanh(column(own)))
    found.square().sum().backward()
    expected = [outputs, inputs.grad]
    if shape.sequence:
        expected = [each.chunk(size, 1)[rank] for each in expected]
    expected.append(Division(0, tuple(blocks)).part(weights[0].grad, rank, size))
    expected.append(Division(1, tuple(blocks)).part(weights[1].grad, rank, size))
    got = [found, own.grad]
    got += [
        each.weight.grad.t() if shape.transposed else each.weight.grad for each in (column, row)
    ]
    if shape.bias:
        expected += [Division(0, tuple(blocks)).part(weights[2].grad, rank, size), weights[3].grad]
        got += [column.bias.grad, row.bias.grad]
    return max(float((a - b).detach().abs().max()) for a, b in zip(got, expected, strict=True))


@settings(max_examples=4)
@given(degree=st.sampled_from([1, 2, 3]), shapes=st.lists(SHAPES, min_size=5, max_size=12))
def test_a_pair_of_layers_is_what_it_divides(degree: int, shapes: list[Shape]) -> None:
    rows = on_ranks(degree, lambda context: [pair(shape, context.group) for shape in shapes])
    assert max(map(max, rows)) < CLOSE


def costs(group: Group) -> dict[str, tuple[int, int]]:
    """Elements that a rank sends, there and back, of 48; values are checked against plain sums."""
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(2, 4, 6 * 4, generator=generator, dtype=torch.float64)
    size = group.size
    rank = group.rank
    features = whole.chunk(size, -1)[rank]
    shard = whole.chunk(size, 1)[rank]
    cases: dict[str, tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]] = {
        "enter": (between.enter, whole, whole, size * whole),
        "leave": (between.leave, whole, size * whole, size * whole),
        "gather_features": (between.gather_features, features, whole, features),
        "scatter_features": (between.scatter_features, whole, features, whole),
        "enter_sequence": (between.enter_sequence, shard, whole, size * shard),
        "leave_sequence": (between.leave_sequence, whole, size * shard, size * whole),
        "scatter_sequence": (between.scatter_sequence, whole, shard, whole),
        "share": (
            partial(between.gather_shared_unit, sharers=size),
            features,
            whole,
            size * features,
        ),
    }
    found = {}
    for name, (function, given_, result, gradient) in cases.items():
        own = given_.clone().requires_grad_()
        before = group.meter.counters.bytes_sent
        output = function(own, group)
        there = group.meter.counters.bytes_sent
        assert torch.allclose(output, result), name
        output.backward(output.detach().clone())  # type: ignore[no-untyped-call]
        assert own.grad is not None
        assert torch.allclose(own.grad, gradient), name
        found[name] = ((there - before) // 8, (group.meter.counters.bytes_sent - there) // 8)
    return found


def test_what_travels() -> None:
    for size, rows in at_all_degrees(costs).items():
        n = 2 * 4 * 24
        all_reduce = 2 * (size - 1) * n // size
        half = (size - 1) * n // size
        for row in rows:
            assert row == {
                "enter": (0, all_reduce),
                "leave": (all_reduce, 0),
                "gather_features": (half, 0),
                "scatter_features": (0, half),
                "enter_sequence": (half, half),
                "leave_sequence": (half, half),
                "scatter_sequence": (0, half),
                "share": (half, half),
            }


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_units_and_ranks_go_into_each_other(units: int, width: int, size: int) -> None:
    """Each rank has whole units, or ranks that share one divide its outputs evenly."""
    if units % size == 0:
        assert sharers("a layer", units * width, size, width) == 1
    elif size % units == 0 and width % (size // units) == 0:
        assert sharers("a layer", units * width, size, width) == size // units
    else:
        with pytest.raises(ValueError, match=r"a layer has .*: choose a"):
            sharers("a layer", units * width, size, width)


def linear(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs).double()


def several(context: RankContext) -> None:
    group = context.group
    rank = context.group.rank
    inputs = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    whole = linear(6, 12)
    blocks = (8, 2, 2)
    column = ColumnParallel.from_linear(whole, group, blocks=blocks, gather_output=True)
    row = RowParallel.from_linear(linear(12, 5), group, input_is_parallel=False)
    assert torch.allclose(column(inputs), whole(inputs), atol=CLOSE)
    assert torch.allclose(row(whole(inputs)), linear(12, 5)(whole(inputs)), atol=CLOSE)
    first = [whole.weight[4 * rank : 4 * rank + 4], whole.weight[8 + rank], whole.weight[10 + rank]]
    assert torch.equal(column.weight, torch.cat([each.reshape(-1, 6) for each in first]))

    twin = copy.deepcopy(column)
    assert twin.group is column.group
    assert torch.equal(twin(inputs), column(inputs))
    assert twin.weight is not column.weight

    frozen = linear(6, 12).requires_grad_(False)
    assert not ColumnParallel.from_linear(frozen, group).weight.requires_grad

    single = ColumnParallel.from_linear(whole.float(), group)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = single(inputs.float())
    assert outputs.dtype == torch.bfloat16
    outputs.float().sum().backward()
    assert single.weight.grad.dtype == torch.float32

    for kind, sizes, message in (
        (
            ColumnParallel,
            (6, 9),
            "the column-parallel layer with 9 outputs has 9 to divide, not a multiple of the ",
        ),
        (
            RowParallel,
            (7, 4),
            "the row-parallel layer with 7 inputs has 7 to divide, not a multiple of the degree 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            kind.from_linear(linear(*sizes), group)  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"3 \(units of 4\) to divide, not a multiple of the degree 2"
    ):
        ColumnParallel.from_linear(linear(6, 12), group, unit=4)
    with pytest.raises(ValueError, match=r"the blocks \[4, 4\] of .* do not sum to its 12 outputs"):
        ColumnParallel.from_linear(linear(6, 12), group, blocks=(4, 4))
    with pytest.raises(
        ValueError, match="has 2 blocks, but units can be shared only with one block"
    ):
        ColumnParallel.from_linear(linear(6, 12), group, blocks=(6, 6), shares=True)
    with pytest.raises(ValueError, match="a Conv1d is not a linear layer"):
        RowParallel.from_linear(nn.Conv1d(2, 2, 1), group)
    odd = RowParallel.from_linear(linear(6, 4), group, sequence=1, input_is_parallel=False)
    with pytest.raises(
        ValueError, match="a sequence of 3 cannot be divided by the degree 2: pad it"
    ):
        odd(inputs[:, :3])

    torch.manual_seed(0)
    with per_rank_draws(group):
        own = torch.rand(8)
    common = torch.rand(8)
    rows = group.all_gather_values([*own.tolist(), *common.tolist()])
    assert rows[0][:8] != rows[1][:8]
    assert rows[0][8:] == rows[1][8:]


@pytest.mark.parametrize("backend", ["dure", "gloo"])
def test_options_and_errors(backend: str) -> None:
    on_ranks(2, several, backend)


def dropping(group: Group, again: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What dropout has left inside and outside, and the gradient.

    again: by a checkpoint that computes it twice.
    """
    from dure.parallel.tensor import parallelize, plan_for

    torch.manual_seed(2)
    layers = [nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 32), nn.Dropout(0.5)]
    model = nn.Sequential(*layers).double()
    inputs = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    parallelize(model, plan_for(model), group)
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for place, index in enumerate((1, 3)):
        model[index].register_forward_hook(
            lambda m, i, o, context=place: seen[context].append((o == 0).double())
        )
    output = checkpoint(model, inputs, use_reentrant=False) if again else model(inputs)
    output.square().sum().backward()
    assert inputs.grad is not None
    after = torch.rand(4, dtype=torch.float64)
    everybody = group.all_gather_values(after.tolist())
    assert all(row == everybody[0] for row in everybody)
    return *seen, inputs.grad


def dropout(context: RankContext) -> None:
    group = context.group
    inside, outside, gradient = dropping(group, False)
    masks = group.all_gather_values(inside[0].flatten().tolist())
    assert masks[0] != masks[1]
    assert 0.3 < sum(masks[0]) / len(masks[0]) < 0.7
    masks = group.all_gather_values(outside[0].flatten().tolist())
    assert masks[0] == masks[1]
    rows = group.all_gather_values(gradient.flatten().tolist())
    assert rows[0] == rows[1]
    twice = dropping(group, True)
    assert torch.equal(twice[2], gradient)
    assert torch.equal(twice[0][0], inside[0])
    assert all(torch.equal(each, twice[0][0]) for each in twice[0])


def test_dropout_differs_inside_and_not_outside() -> None:
    on_ranks(2, dropout)
