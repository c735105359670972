"""Convolution as a matrix product: equal to torch's, and its two maps adjoint to each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dure.parallel.threads.convolution import col2im, conv2d_flops, conv2d_im2col, im2col, window

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))
SMALL = st.tuples(st.integers(1, 4), st.integers(1, 4))
WINDOWS = st.fixed_dictionaries(
    {
        "kernel": SMALL,
        "stride": SMALL,
        "padding": st.tuples(st.integers(0, 3), st.integers(0, 3)),
        "dilation": SMALL,
    }
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fits(size: tuple[int, int], over: dict[str, Any]) -> bool:
    try:
        window(**over).outputs(*size)
    except ValueError:
        return False
    return True


@given(
    size=SIZES,
    over=WINDOWS,
    batch=st.integers(1, 3),
    per_group=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 3),
    at_once=st.none() | st.integers(1, 3),
    with_bias=st.booleans(),
)
def test_it_is_torchs_convolution_forward_and_backward(
    size: tuple[int, int],
    over: dict[str, Any],
    batch: int,
    per_group: tuple[int, int],
    groups: int,
    at_once: int | None,
    with_bias: bool,
) -> None:
    assume(fits(size, over))
    inputs, outputs = per_group
    settings = {name: over[name] for name in ("stride", "padding", "dilation")} | {"groups": groups}
    leaves = [
        numbers(batch, inputs * groups, *size),
        numbers(outputs * groups, inputs, *over["kernel"], seed=1),
    ]
    leaves += [numbers(outputs * groups, seed=2)] if with_bias else []
    results = []
    for convolution in (F.conv2d, partial(conv2d_im2col, at_once=at_once)):
        mine = [leaf.clone().requires_grad_() for leaf in leaves]
        result = convolution(*mine, **settings)
        result.backward(numbers(*result.shape, seed=3))
        results.append([result, *(leaf.grad for leaf in mine)])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@given(size=SIZES, over=WINDOWS, batch=st.integers(1, 3), channels=st.integers(1, 3))
def test_im2col_is_torchs_unfold_and_col2im_is_its_adjoint(
    size: tuple[int, int], over: dict[str, Any], batch: int, channels: int
) -> None:
    assume(fits(size, over))
    images = numbers(batch, channels, *size)
    columns = im2col(images, **over)
    unfolded = F.unfold(images, over["kernel"], over["dilation"], over["padding"], over["stride"])
    assert torch.equal(columns, unfolded.transpose(0, 1).reshape(columns.shape))
    others = numbers(*columns.shape, seed=1)
    back = col2im(others, tuple(images.shape), **over)  # type: ignore[arg-type]
    torch.testing.assert_close(
        (columns * others).sum(), (images * back).sum(), rtol=1e-12, atol=1e-12
    )


@given(size=SIZES, over=WINDOWS)
def test_there_and_back_a_pixel_counts_as_often_as_patches_hold_it(
    size: tuple[int, int], over: dict[str, Any]
) -> None:
    assume(fits(size, over))
    images = numbers(2, 2, *size)
    made = window(**over)
    counts = torch.zeros(size)
    for i, j, rows, across in made.taps(*size):
        assert (i, j) < made.kernel
        padded = torch.zeros(size[0] + 2 * made.padding[0], size[1] + 2 * made.padding[1])
        padded[rows, across] = 1
        counts += padded[made.padding[0] :, made.padding[1] :][: size[0], : size[1]]
    back = col2im(im2col(images, **over), tuple(images.shape), **over)  # type: ignore[arg-type]
    torch.testing.assert_close(back, images * counts, rtol=1e-13, atol=0)


def test_without_stride_and_padding_an_inner_pixel_is_in_as_many_patches_as_the_kernel_is_large():
    counts = col2im(im2col(torch.ones(1, 1, 7, 6), 3), (1, 1, 7, 6), 3)[0, 0]
    assert counts[2:5, 2:4].eq(9).all()
    assert counts[0].tolist() == [1, 2, 3, 3, 2, 1]


def test_gradients_are_those_of_finite_differences() -> None:
    leaves = [numbers(2, 4, 5, 4), numbers(4, 2, 3, 2, seed=1), numbers(4, seed=2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(
        lambda *of: conv2d_im2col(*of, stride=2, padding=(1, 2), groups=2), leaves
    )


def test_only_the_gradients_that_are_asked_for_are_made() -> None:
    images = numbers(1, 1, 4, 4)
    kernels = numbers(1, 1, 2, 2, seed=1).requires_grad_()
    conv2d_im2col(images, kernels).sum().backward()
    assert images.grad is None
    assert kernels.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_works_in_other_precisions_and_on_images_whose_channels_lie_last(
    dtype: torch.dtype,
) -> None:
    images = numbers(2, 3, 6, 6).to(dtype)
    kernels = numbers(4, 3, 3, 3, seed=1).to(dtype)
    expected = F.conv2d(images.double(), kernels.double(), padding=1)
    ours = conv2d_im2col(images.contiguous(memory_format=torch.channels_last), kernels, padding=1)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_operations_are_two_for_each_weight_and_output() -> None:
    over = window(5, padding=2)
    assert conv2d_flops((10, 32, 14, 14), (64, 32, 5, 5), over) == 2 * 64 * 32 * 25 * 14 * 14 * 10
    assert im2col(torch.ones(10, 32, 14, 14), 5, padding=2).numel() == 25 * 10 * 32 * 14 * 14
    assert im2col(torch.ones(1, 1, 8, 8), 4, stride=2, padding=1).numel() == 16 * 64 // 4


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (
            lambda: conv2d_im2col(torch.ones(3, 4, 4), torch.ones(1, 3, 2, 2)),
            r"images have the shape \(B, C, H, W\)",
        ),
        (
            lambda: conv2d_im2col(torch.ones(1, 3, 4, 4), torch.ones(4, 3, 2, 2), groups=2),
            "do not fit into 2 groups",
        ),
        (
            lambda: conv2d_im2col(torch.ones(1, 2, 4, 4), torch.ones(3, 1, 2, 2), groups=2),
            "do not fit into 2 groups",
        ),
        (
            lambda: conv2d_im2col(torch.ones(1, 1, 4, 4), torch.ones(3, 1, 2, 2), torch.ones(2)),
            "the bias has the shape",
        ),
        (
            lambda: conv2d_im2col(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 5, 5)),
            "smaller than the kernel",
        ),
        (
            lambda: im2col(torch.ones(1, 1, 4, 4), 2, stride=0),
            "the stride of a convolution has to be at least 1",
        ),
        (
            lambda: im2col(torch.ones(1, 1, 4, 4), 2, padding=-1),
            "the padding of a convolution has to be at least 0",
        ),
        (
            lambda: col2im(torch.ones(4, 4), (1, 1, 4, 4), 2),
            r"columns have the shape \(4, 4\), expected \(4, 9\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call()
