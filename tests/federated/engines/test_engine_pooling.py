"""Pooled convolutions and pooling in C are what torch's layers are, with every set of instructions
of this machine."""

from __future__ import annotations

import pytest
import torch
from clients_at_work import jobs_of, results, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import dure
from dure.federated.engines import pooling
from dure.federated.engines.batched import batched_engine
from dure.federated.engines.layers import PatchConvolution, PoolingLayer, Relu, max_pool
from dure.federated.engines.pooling import LargestOf, PooledConvolution
from dure.federated.engines.program import program_of
from dure.federated.engines.sgd import SGD, Weights
from small import small_task

pytestmark = pytest.mark.skipif(
    pooling.library() is None, reason="no C compiler was there when dure was installed"
)
REALS = st.sampled_from([torch.float64, torch.float32])
LEVELS = range(pooling.instructions() + 1)


def weights(values: torch.Tensor) -> Weights:
    """Of clients, (A, *shape), which move against their gradient with a rate of 1."""
    made = Weights(tuple(values.shape[1:]))
    made.load(values.flatten(1), len(values), SGD(1.0))
    return made


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    size = theirs.abs().max().clamp(min=1)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / size) < (1e-12 if dtype == torch.float64 else 1e-4)


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    monkeypatch.setattr(pooling, "instructions", lambda: request.param)


@st.composite
def convolutions(draw):
    """(clients, examples, channels in, channels out, kernel, stride, padding, dilation, image), all
    of it possible."""
    channels, (kh, kw) = draw(
        st.sampled_from([(1, (5, 5)), (1, (1, 1)), (3, (3, 3)), (1, (2, 7)), (8, (2, 2))])
    )
    stride, dilation = (
        draw(st.tuples(*[st.integers(1, 2)] * 2)),
        draw(st.tuples(*[st.integers(1, 2)] * 2)),
    )
    padding = draw(st.tuples(*[st.integers(0, 2)] * 2))
    image = tuple(
        draw(st.integers(max(1, over * (kernel - 1) + 1 + step - 2 * pad), 16))
        for kernel, step, pad, over in zip((kh, kw), stride, padding, dilation, strict=True)
    )
    out = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 50, 64]))
    return (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        channels,
        out,
        (kh, kw),
        stride,
        padding,
        dilation,
        image,
    )


@pytest.mark.usefixtures("level")
@given(convolutions(), REALS, st.booleans(), st.booleans(), st.integers(0, 999))
@settings(max_examples=60)
def test_a_pooled_convolution_is_torch_s(shape, dtype, relu, biased, seed):
    clients, examples, channels, out, kernel, stride, padding, dilation, image = shape
    torch.manual_seed(seed)
    x = torch.randn(clients, examples, channels, *image, dtype=dtype)
    w, b = (
        torch.randn(clients, out, channels, *kernel, dtype=dtype),
        torch.randn(clients, out, dtype=dtype),
    )
    ours_w, ours_b = weights(w), weights(b) if biased else None
    layer = PooledConvolution(PatchConvolution(ours_w, ours_b, stride, padding, dilation), relu)
    w, b = w.double().requires_grad_(), b.double().requires_grad_()
    theirs = torch.stack(
        [
            F.max_pool2d(
                F.conv2d(images, kernels, bias if biased else None, stride, padding, dilation), 2
            )
            for images, kernels, bias in zip(x.double(), w, b, strict=True)
        ]
    )
    theirs = F.relu(theirs) if relu else theirs
    y = layer.forward(x, [examples] * clients)
    close(y, theirs.detach(), dtype)
    g = torch.randn(theirs.shape, dtype=dtype)
    layer.backward(g, False)
    of_w, of_b = torch.autograd.grad(theirs, (w, b), g.double(), allow_unused=True)
    close(w.detach() - ours_w.values, of_w, dtype)
    if ours_b is not None:
        close(b.detach() - ours_b.values, of_b, dtype)


@pytest.mark.usefixtures("level")
@given(
    st.tuples(*[st.integers(1, 3)] * 2),
    st.sampled_from([1, 3, 8, 16, 17, 64]),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.integers(4, 9)] * 2),
    st.booleans(),
    REALS,
    st.integers(0, 999),
)
@settings(max_examples=60)
def test_pooling_has_torch_s_bits(count, channels, window, image, relu, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randint(-3, 4, (*count, channels, *image)).to(
        dtype
    )  # many are alike: the first of them counts
    x[torch.rand(x.shape) < 0.05] = torch.nan
    layer = LargestOf(window, relu)
    y = layer.forward(x, [count[1]] * count[0])
    theirs_x = x.flatten(0, 1).requires_grad_()
    theirs = F.max_pool2d(theirs_x, window)
    theirs = F.relu(theirs) if relu else theirs
    assert y.flatten(0, 1).equal(theirs) or y.flatten(0, 1).nan_to_num(99).equal(
        theirs.detach().nan_to_num(99)
    )
    g = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, theirs_x, g)[0]
    assert layer.backward(g.view(y.shape), True).flatten(0, 1).equal(expected)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_goes_through_a_pooled_convolution_as_through_torch_s(dtype):
    x = torch.zeros(1, 3, 1, 6, 6, dtype=dtype)
    x[0, 0, 0, 2, 2], x[0, 1, 0, 3, 1], x[0, 2, 0, 0, 0] = torch.nan, torch.inf, -torch.inf
    w, b = weights(torch.ones(1, 5, 1, 1, 1, dtype=dtype)), weights(torch.zeros(1, 5, dtype=dtype))
    layer = PooledConvolution(PatchConvolution(w, b, (1, 1), (0, 0), (1, 1)), True)
    y = layer.forward(x, [3])
    expected = F.relu(F.max_pool2d(x[0].expand(3, 5, 6, 6), 2))
    assert y[0].nan_to_num(99, 98, 97).equal(expected.nan_to_num(99, 98, 97))


class Images(nn.Module):
    """The chain that is fused: both convolutions, both ways to write relu and pooling."""

    def __init__(self, relu_first: bool) -> None:
        super().__init__()
        self.one, self.two, self.out = (
            nn.Conv2d(1, 9, 3, padding=1),
            nn.Conv2d(9, 5, 3),
            nn.Linear(5, 3),
        )
        self.relu_first = relu_first
        self.double()

    def forward(self, x):
        x = (
            F.max_pool2d(F.relu(self.one(x)), 2)
            if self.relu_first
            else F.relu(F.max_pool2d(self.one(x), 2))
        )
        return self.out(F.max_pool2d(self.two(x), 2).flatten(1))


def task_of_images(relu_first: bool = True):
    torch.manual_seed(0)
    train = dure.Examples(torch.randn(20, 1, 8, 8, dtype=torch.float64), torch.arange(20) % 3)
    return small_task(model=lambda: Images(relu_first), train=train)


@pytest.mark.parametrize("relu_first", [True, False])
def test_a_model_s_layers_are_those_in_c_and_equal_to_torch_s(monkeypatch, relu_first):
    task = task_of_images(relu_first)
    jobs = jobs_of([9, 4, 7], [3, 1, 2], weights_of(task.model))
    made = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(pooling, "library", lambda: None)
        chain = program_of(task, task.model(), task.train).chain
        kinds = [type(layer) for layer in chain]
        assert (PooledConvolution in kinds and LargestOf in kinds and Relu not in kinds) == there
        assert (PoolingLayer in kinds) != there
        made.append(results(batched_engine(task, task.model(), task.train, 4, 3), jobs))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours.delta[0], theirs.delta[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        ((3, 3), (2, 2), (0, 0), (1, 1), False),
        ((2, 2), (2, 2), (1, 1), (1, 1), False),
        ((2, 2), (2, 2), (0, 0), (2, 2), False),
        ((2, 2), (2, 2), (0, 0), (1, 1), True),
        ((16, 16), (16, 16), (0, 0), (1, 1), False),
    ],
)
def test_other_pooling_is_left_to_torch(how):
    layer = max_pool(*how)
    assert pooling.with_c_layers([layer, Relu()])[0] is layer
