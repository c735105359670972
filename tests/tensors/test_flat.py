"""Many tensors as one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dure.tensors.flat import (
    FlatParameters,
    by_dtype,
    check_no_shared_memory,
    trainable_parameters,
    views_of,
)

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=5)


@given(SHAPES)
def test_views_are_consecutive_pieces_of_the_buffer(shapes):
    like = [torch.empty(shape) for shape in shapes]
    buffer = torch.arange(float(sum(tensor.numel() for tensor in like)))
    views = views_of(buffer, like)
    assert [view.shape for view in views] == [tensor.shape for tensor in like]
    assert torch.equal(torch.cat([view.reshape(-1) for view in views] or [torch.empty(0)]), buffer)
    buffer.add_(1)
    assert all(
        view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for view in views
    )


@given(st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))
def test_groups_by_dtype_keep_the_order(dtypes):
    tensors = [torch.empty(1, dtype=dtype) for dtype in dtypes]
    groups = by_dtype(tensors)
    assert list(groups) == list(dict.fromkeys(dtypes))
    for dtype, group in groups.items():
        assert [id(t) for t in group] == [id(t) for t in tensors if t.dtype == dtype]


class Mixed(nn.Module):
    """Two dtypes, a tied weight, a scalar, an empty parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs):
        return self.second(self.first(inputs)) * self.scale + self.frozen.sum()


def test_a_model_computes_the_same_on_its_flat_parameters():
    model, inputs = Mixed(), torch.randn(4, 3)
    before, names = (
        model(inputs),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    flat = FlatParameters(model)
    assert torch.equal(model(inputs), before)
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())
    assert [(b.dtype, b.numel()) for b in flat.buffers] == [
        (torch.float64, 2),
        (torch.float32, 1 + 9 + 3 + 3),
    ]
    assert model.first.weight is model.second.weight


def test_loading_a_buffer_sets_the_model_and_an_update_shows_in_the_buffer():
    model = Mixed()
    flat = FlatParameters(model)
    copy = flat.copy()
    flat.load([torch.full_like(buffer, 0.5) for buffer in flat.buffers])
    assert all(bool((p == 0.5).all()) for p in trainable_parameters(model))
    assert bool((model.frozen == 1).all())
    flat.load(copy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(flat.buffers[1], copy[1])
    assert torch.equal(flat.buffers[1][1:10].view(3, 3), model.first.weight)
    assert torch.equal(flat.buffers[0], copy[0])


def test_a_model_moves_to_other_memory_and_back_without_a_copy():
    model = Mixed()
    flat = FlatParameters(model)
    before = flat.copy()
    home = flat.room(flat.buffers)
    other = flat.room([torch.full_like(buffer, 0.5) for buffer in flat.buffers])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat.move(other)
    assert all(bool((p == 0.5).all()) for p in trainable_parameters(model))
    assert model.first.weight is model.second.weight
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not bool((other.buffers[1] == 0.5).all())
    assert flat.buffers is other.buffers
    flat.move(home)
    assert all(torch.equal(a, b) for a, b in zip(flat.buffers, before, strict=True))
    assert torch.equal(model.first.weight.flatten(), before[1][1:10])


def test_a_copy_is_nobody_s_view():
    flat = FlatParameters(nn.Linear(2, 2))
    copy = flat.copy()
    flat.buffers[0].zero_()
    assert bool(copy[0].any())


def test_a_parameter_in_the_memory_of_another_tensor_is_refused_by_both_names():
    check_no_shared_memory(Mixed())
    model = Mixed()
    flat = FlatParameters(model)
    check_no_shared_memory(model)
    assert flat.buffers
    model.head = nn.Parameter(model.first.weight.data.T, requires_grad=False)
    with pytest.raises(
        ValueError, match=r"head and first\.weight are two tensors in the same memory"
    ):
        check_no_shared_memory(model)
    model.head = nn.Parameter(model.first.weight.detach().clone())
    check_no_shared_memory(model)
    model.register_buffer("last", model.first.bias.data[2:])
    with pytest.raises(
        ValueError, match=r"first\.bias and last are two tensors in the same memory"
    ):
        check_no_shared_memory(model)


def test_columns_of_one_matrix_are_apart_and_frozen_ones_may_be_the_same():
    whole = torch.zeros(4, 6)
    left, right = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])
    check_no_shared_memory(nn.ParameterList([left, right]))
    with pytest.raises(ValueError, match="0 and 1 are two tensors in the same memory"):
        check_no_shared_memory(nn.ParameterList([left, nn.Parameter(whole[:, 2:4])]))
    same = [nn.Parameter(whole, requires_grad=False), nn.Parameter(whole, requires_grad=False)]
    check_no_shared_memory(nn.ParameterList(same))


def test_parameters_that_were_let_go_need_no_memory_until_they_are_loaded():
    model, inputs = Mixed(), torch.randn(4, 3)
    flat = FlatParameters(model)
    before, values = model(inputs), flat.copy()
    taken = model.state_dict()["first.weight"]
    kept = taken.clone()
    for _ in range(2):
        flat.release()
    parameters = trainable_parameters(model)
    assert sum(one.untyped_storage().nbytes() for one in parameters) <= 8 * len(parameters)
    assert model.first.weight.shape == (3, 3)
    assert model.second.weight is model.first.weight
    assert model(inputs).isnan().all()  # never silently something else
    assert torch.equal(taken, kept)  # whoever holds a view has what was there
    flat.load(values)
    assert torch.equal(model(inputs), before)
    assert all(torch.equal(a, b) for a, b in zip(flat.copy(), values, strict=True))
    model(inputs).sum().backward()
    assert model.first.weight.grad is not None
