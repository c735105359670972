"""Convolution and pooling layers in C (`core/pooling.c`), on CPUs.

Between a convolution of few input channels and the pooling after it are the largest values of an
image model: four times the pooled output, and patches of 25 times the image. Writing and reading
them takes several times as long as computing them. The C code computes an output at the four pooled
places, applies relu, and passes the largest on, all in registers. The backward pass needs only the
place of the largest, a byte; the gradient of the kernels sums the images themselves at those
places.

Savings of a round's processor time against torch's layers (one thread each, five rounds and more,
alternating): the CNN for MNIST 14 % with batches of 10 examples and 22 % with 50, the CNN for the
digits of 8x8 pixels 8 %.

If no compiler was available when dure was installed, torch computes the same, layer by layer
(`dure.federated.engines.layers`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int, c_int64, c_void_p
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dure.federated.engines.layers import (
    BatchedLayer,
    Pair,
    PatchConvolution,
    PoolingLayer,
    Relu,
    innermost,
)
from dure.machine.c_library import c_library

# `layers.FEW`, the limit for writing patches out, is not larger: every such kernel fits.
MOST_TAPS = 32
"""Largest number of elements of a kernel."""

WINDOW = (2, 2)
"""Window of outputs of a convolution that are pooled together."""

NONE_POSITIVE = 255
"""Code for a window in which no value is larger than 0."""

REALS = {torch.float32: 0, torch.float64: 1}


# Both structures match core/pooling.h: the same fields in the same order.
class _Convolution(Structure):
    _fields_ = (
        ("clients", c_int64),
        ("images", c_int64),
        ("image", c_int64),
        ("kernels", c_int64),
        ("taps", c_int64),
        ("kernels_stride", c_int64),
        ("bias_stride", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("down", c_int64),
        ("right", c_int64),
        ("relu", c_int64),
        ("tap", c_int64 * MOST_TAPS),
        ("window", c_int64 * (WINDOW[0] * WINDOW[1])),
    )


class _Pooling(Structure):
    _fields_ = (
        ("images", c_int64),
        ("channels", c_int64),
        ("height", c_int64),
        ("width", c_int64),
        ("window_height", c_int64),
        ("window_width", c_int64),
        ("relu", c_int64),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled layers; None if the package was installed without a C compiler."""
    core = c_library(Path(__file__).parent, "_pooling")
    if core is not None:
        convolution = POINTER(_Convolution)
        pooling = POINTER(_Pooling)
        kind = (c_int, c_int)
        core.pooling_convolve.argtypes = (*kind, convolution, *[c_void_p] * 5)
        core.pooling_gather.argtypes = (*kind, convolution, *[c_void_p] * 5)
        core.pooling_pool.argtypes = (*kind, pooling, *[c_void_p] * 3)
        core.pooling_unpool.argtypes = (*kind, pooling, *[c_void_p] * 3)
        for function in (
            core.pooling_convolve,
            core.pooling_gather,
            core.pooling_pool,
            core.pooling_unpool,
        ):
            function.restype = None
    return core


@cache
def instructions() -> int:
    """Return the widest instruction set of this machine: 0 plain, 1 AVX2, 2 AVX-512."""
    core = library()
    return 0 if core is None else int(core.pooling_best())


class PooledConvolution(BatchedLayer):
    """nn.Conv2d of few input channels, the largest of 2x2 of its outputs, and relu if requested.

    It is the first layer with parameters: the gradient of its inputs is not needed.
    """

    trained = True

    def __init__(self, convolution: PatchConvolution, relu: bool) -> None:
        self.weight = convolution.weight
        self.bias = convolution.bias
        self.relu = relu
        self.stride = convolution.stride
        self.padding = convolution.padding
        self.dilation = convolution.dilation
        self.images = self.which = torch.empty(0)
        self.shape = _Convolution()

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        core = library()
        assert core is not None
        ph, pw = self.padding
        clients = len(x)
        self.images = F.pad(x, (pw, pw, ph, ph)).contiguous()
        kernels = self.weight.now
        # C always adds a bias.
        none = kernels.new_zeros(clients, len(kernels[0]))
        bias = none if self.bias is None else self.bias.now
        # Clients' kernels begin on cache lines of their own (`sgd.LINE`), so there may be gaps
        # between them.
        self.shape = shape = self._shape(kernels.stride(0), bias.stride(0))
        outputs = x.new_empty(clients, x.shape[1], shape.rows, shape.columns, shape.kernels)
        self.which = torch.empty_like(outputs, dtype=torch.uint8)
        # This tuple keeps the tensors alive until the call has ended: C gets bare addresses.
        tensors = (self.images, kernels, bias, outputs, self.which)
        core.pooling_convolve(
            instructions(), REALS[x.dtype], shape, *(each.data_ptr() for each in tensors)
        )
        return outputs.movedim(-1, 2)

    def _shape(self, kernels_stride: int, bias_stride: int) -> _Convolution:
        clients, images, channels, height, width = self.images.shape
        out, _, kh, kw = self.weight.shape
        sh, sw = self.stride
        dh, dw = self.dilation
        rows = ((height - dh * (kh - 1) - 1) // sh + 1) // WINDOW[0]
        columns = ((width - dw * (kw - 1) - 1) // sw + 1) // WINDOW[1]
        if min(rows, columns) < 1:
            raise ValueError(
                f"images of {height}x{width} pixels are too small for a kernel of {kh}x{kw} and "
                f"pooling"
            )
        of_channel = height * width
        # Offsets of the elements under a kernel from the first element: channel, row, column, in
        # the order of the weights.
        tap = [
            channel * of_channel + row * dh * width + column * dw
            for channel, row, column in product(range(channels), range(kh), range(kw))
        ]
        places = product(range(WINDOW[0]), range(WINDOW[1]))
        window = [row * sh * width + column * sw for row, column in places]
        return _Convolution(
            clients=clients,
            images=images,
            image=channels * of_channel,
            kernels=out,
            taps=len(tap),
            kernels_stride=kernels_stride,
            bias_stride=bias_stride,
            rows=rows,
            columns=columns,
            down=WINDOW[0] * sh * width,
            right=WINDOW[1] * sw,
            relu=self.relu,
            tap=(c_int64 * MOST_TAPS)(*tap),
            window=(c_int64 * len(window))(*window),
        )

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        assert not needs_input, "it is the first layer"
        core = library()
        assert core is not None
        clients = len(g)
        # C reads the channels innermost, in the layout of the outputs.
        rows = g.movedim(2, -1).contiguous()
        kernels = g.new_empty(clients, *self.weight.shape)
        bias = g.new_empty(clients, self.weight.shape[0])
        tensors = (self.images, rows, self.which, kernels, bias)
        core.pooling_gather(
            instructions(), REALS[g.dtype], self.shape, *(each.data_ptr() for each in tensors)
        )
        self.weight.sum(kernels)
        if self.bias is not None:
            self.bias.sum(bias)
        return g


class LargestOf(BatchedLayer):
    """nn.MaxPool2d of adjacent windows, followed by relu if requested."""

    def __init__(self, window: Pair, relu: bool) -> None:
        self.window = window
        self.relu = relu
        self.before: torch.Size = torch.Size()
        self.which = torch.empty(0)
        self.shape = _Pooling()

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        core = library()
        assert core is not None
        self.before = x.shape
        images, channels, height, width = x.flatten(0, 1).shape
        rows = height // self.window[0]
        columns = width // self.window[1]
        if min(rows, columns) < 1:
            raise ValueError(
                f"images of {height}x{width} pixels are smaller than a window of {self.window}"
            )
        self.shape = _Pooling(
            images=images,
            channels=channels,
            height=height,
            width=width,
            window_height=self.window[0],
            window_width=self.window[1],
            relu=self.relu,
        )
        inputs = innermost(x.flatten(0, 1))
        outputs = x.new_empty(*x.shape[:2], rows, columns, channels)
        self.which = torch.empty_like(outputs, dtype=torch.uint8)
        tensors = (inputs, outputs, self.which)
        core.pooling_pool(
            instructions(), REALS[x.dtype], self.shape, *(each.data_ptr() for each in tensors)
        )
        return outputs.movedim(-1, 2)

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        if not needs_input:
            return g
        core = library()
        assert core is not None
        clients, examples, channels, height, width = self.before
        # Uninitialised: C writes all of it, including zeros outside of windows.
        before = g.new_empty(clients, examples, height, width, channels)
        tensors = (g.movedim(2, -1).contiguous(), self.which, before)
        core.pooling_unpool(
            instructions(), REALS[g.dtype], self.shape, *(each.data_ptr() for each in tensors)
        )
        return before.movedim(-1, 2)


def with_c_layers(chain: Sequence[BatchedLayer]) -> list[BatchedLayer]:
    """Return the chain with C layers in place of equivalent layers of `layers`."""
    made: list[BatchedLayer] = []
    trained = False
    at = 0
    while at < len(chain):
        layer, *after = chain[at : at + 3]
        # Only before any trained layer, because this layer computes no gradient of its inputs.
        pooled = not trained and bool(after) and _window(after[0]) == WINDOW
        if pooled and isinstance(layer, PatchConvolution):
            # relu comes after pooling here (`program` has moved it there); it is merged if it is
            # next.
            relu = isinstance(after[-1], Relu)
            made.append(PooledConvolution(layer, relu))
            at += 2 + relu
        elif (window := _window(layer)) is not None:
            relu = bool(after) and isinstance(after[0], Relu)
            made.append(LargestOf(window, relu))
            at += 1 + relu
        else:
            made.append(layer)
            at += 1
        trained = trained or layer.trained
    return made


def _window(layer: BatchedLayer) -> Pair | None:
    """Return the window of a pooling layer that C supports; None for every other layer."""
    window = layer.window if isinstance(layer, PoolingLayer) else None
    return window if window is not None and window[0] * window[1] <= NONE_POSITIVE else None
