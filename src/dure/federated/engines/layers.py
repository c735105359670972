"""Layers of many clients at once, forward and backward by hand.

Values have the shape (A, B, ...): A clients with B examples each. A layer with parameters has a
weight per client, W (A, out, in), so that A matrix products are a single call, or a single product
if clients share the weight:

    forward     Y_a = X_a W_a^T + b_a
    backward    dX_a = dY_a W_a,   then   W_a <- W_a - lr dY_a^T X_a   (`sgd`)

A layer stores the inputs of its backward pass until that pass. Autograd records nothing here.

A convolution is a product too, of the kernels and the patches under them. For few input channels
the patches are written out (`im2col`), which is cheap and several times faster than the general
kernels. For many channels the patches are 25 times the image for 5x5 kernels, and torch's own
kernels are faster: client by client, each with its number of examples.

Images, (A, B, C, h, w), have their channels innermost in memory: pooling is vectorised in this
layout, and products return images in this layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dure.federated.engines.sgd import Weights

Pair = tuple[int, int]

FEW = 32
"""Largest number of elements of a patch (channels times kernel) for writing patches out."""


class BatchedLayer:
    """A layer of a program."""

    trained = False
    """Whether the layer has trained parameters."""

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return outputs for x (A, B, ...); sizes: the number of real examples of each client."""
        raise NotImplementedError

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        """Return the gradient for x, given the gradient for the outputs; update the weights.

        needs_input: whether the gradient for x is needed; if not, the return value has no meaning.
        """
        raise NotImplementedError


class Linear(BatchedLayer):
    """Batched nn.Linear."""

    trained = True

    def __init__(self, weight: Weights, bias: Weights | None) -> None:
        self.weight = weight
        self.bias = bias
        self.x = torch.empty(0)
        if bias is not None:
            bias.beside = weight

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        self.x = x
        shared = None if self.bias is None else self.bias.shared
        if self.weight.factored is not None:
            return self.weight.factored.forward(x, shared)
        if self.weight.shared is not None:
            return F.linear(x, self.weight.shared, shared)
        weight = self.weight.now.transpose(1, 2)
        if self.bias is None:
            return torch.bmm(x, weight)
        return torch.baddbmm(self.bias.now.unsqueeze(1), x, weight)

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        before = g
        shared = self.weight.shared
        factored = self.weight.factored
        if factored is not None:
            before = factored.backward(g) if needs_input else g
            factored.step(g, self.x)
            return before
        # Before the product, which changes the weights: the gradient refers to the old weights.
        if needs_input:
            before = torch.bmm(g, self.weight.now) if shared is None else torch.matmul(g, shared)
        self.weight.product(g.transpose(1, 2), self.x)
        if self.bias is not None:
            self.bias.sum(g.sum(1))
        return before


class FrozenLinear(BatchedLayer):
    """Untrained nn.Linear: the same for all clients, and a single product for all."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        return torch.matmul(g, self.weight) if needs_input else g


class Pointwise(BatchedLayer):
    """A function of each element. derivative: of (gradient, output, input)."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        derivative: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        self.function = function
        self.derivative = derivative
        self.x = self.y = torch.empty(0)

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        self.x = x
        self.y = self.function(x)
        return self.y

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        return self.derivative(g, self.y, self.x) if needs_input else g


class Relu(BatchedLayer):
    """Layer of max(x, 0)."""

    def __init__(self) -> None:
        self.y = torch.empty(0)

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        self.y = torch.relu(x)
        return self.y

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        if not needs_input:
            return g
        # The output is positive exactly if the input is, so the input need not be stored.
        before: Tensor = torch.ops.aten.threshold_backward(g, self.y, 0)
        return before


def tanh() -> Pointwise:
    return Pointwise(torch.tanh, lambda g, y, x: torch.ops.aten.tanh_backward(g, y))


def sigmoid() -> Pointwise:
    return Pointwise(torch.sigmoid, lambda g, y, x: torch.ops.aten.sigmoid_backward(g, y))


def gelu(approximate: str) -> Pointwise:
    return Pointwise(
        lambda x: F.gelu(x, approximate=approximate),
        lambda g, y, x: torch.ops.aten.gelu_backward(g, x, approximate=approximate),
    )


class Reshape(BatchedLayer):
    """Reshape of examples; (-1,) flattens them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.before: torch.Size = torch.Size()

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        self.before = x.shape
        return x.reshape(*x.shape[:2], *self.shape)

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        before = g.reshape(self.before)
        # The gradient is of images: pooling and convolutions need their channels innermost.
        return innermost(before.flatten(0, 1)).view_as(before) if before.ndim == 5 else before


class PoolingLayer(BatchedLayer):
    """Batched nn.MaxPool2d and nn.AvgPool2d.

    largest: whether the layer takes maxima, so that relu may follow instead of precede. window: of
    adjacent windows with maxima; None for other pooling.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], tuple[Tensor, ...]],
        backward: Callable[..., Tensor],
        largest: bool,
        window: Pair | None = None,
    ) -> None:
        self._forward = forward
        self._backward = backward
        self.largest = largest
        self.window = window
        self.saved: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        # Pooling mixes no examples, so clients and examples are a single dimension for it.
        images = innermost(x.flatten(0, 1))
        outputs, *rest = self._forward(images)
        self.saved = (images, *rest)
        return outputs.view(*x.shape[:2], *outputs.shape[1:])

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        if not needs_input:
            return g
        images: Tensor = self._backward(innermost(g.flatten(0, 1)), *self.saved)
        return images.view(*g.shape[:2], *images.shape[1:])


def innermost(images: Tensor) -> Tensor:
    """Return the images, (B, C, h, w), with the channels innermost in memory."""
    return images.contiguous(memory_format=torch.channels_last)


def max_pool(kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil: bool) -> PoolingLayer:
    how = (kernel, stride, padding, dilation, ceil)
    beside = kernel == stride and padding == (0, 0) and dilation == (1, 1) and not ceil
    return PoolingLayer(
        lambda images: torch.ops.aten.max_pool2d_with_indices(images, *how),
        lambda g, images, where: torch.ops.aten.max_pool2d_with_indices_backward(
            g, images, *how, where
        ),
        True,
        kernel if beside else None,
    )


def avg_pool(
    kernel: Pair, stride: Pair, padding: Pair, ceil: bool, count_padding: bool, divisor: int | None
) -> PoolingLayer:
    how = (kernel, stride, padding, ceil, count_padding, divisor)
    return PoolingLayer(
        lambda images: (torch.ops.aten.avg_pool2d(images, *how),),
        lambda g, images: torch.ops.aten.avg_pool2d_backward(g, images, *how),
        False,
    )


class PatchConvolution(BatchedLayer):
    """Batched nn.Conv2d on written-out patches, (A, C·kh·kw, B·oh·ow): a product per client."""

    trained = True

    def __init__(
        self, weight: Weights, bias: Weights | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.patches = torch.empty(0)
        self.images: torch.Size = torch.Size()

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        self.images = x.shape
        # A kernel as a column: the convolution is rows times columns.
        kernels = self.weight.now.flatten(2).transpose(1, 2)
        # Stored for the backward pass, where the patches are a factor of the gradient.
        self.patches, oh, ow = self._patches(x)
        rows = self.patches.transpose(1, 2)
        if self.bias is None:
            outputs = torch.bmm(rows, kernels)
        else:
            outputs = torch.baddbmm(self.bias.now.unsqueeze(1), rows, kernels)
        return outputs.view(*x.shape[:2], oh, ow, -1).movedim(-1, 2)

    def _patches(self, x: Tensor) -> tuple[Tensor, int, int]:
        """Return the patches, and their number in an image: vertically, horizontally."""
        kh, kw = self.weight.shape[2:]
        ph, pw = self.padding
        sh, sw = self.stride
        dh, dw = self.dilation
        padded = F.pad(x, (pw, pw, ph, ph)).contiguous()
        clients, examples, channels, height, width = padded.shape
        oh = (height - dh * (kh - 1) - 1) // sh + 1
        ow = (width - dw * (kw - 1) - 1) // sw + 1
        if min(oh, ow) < 1:
            raise ValueError(
                f"images of {height}x{width} pixels are smaller than a kernel of {kh}x{kw}"
            )
        of_client, of_example, of_channel, of_row, of_pixel = padded.stride()
        # A view of all patches, in which pixels occur several times; `reshape` writes the patches
        # out, in one pass.
        taps = padded.as_strided(
            (clients, channels, kh, kw, examples, oh, ow),
            (
                of_client,
                of_channel,
                of_row * dh,
                of_pixel * dw,
                of_example,
                of_row * sh,
                of_pixel * sw,
            ),
        )
        return taps.reshape(clients, channels * kh * kw, examples * oh * ow), oh, ow

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        clients, examples, _, height, width = self.images
        # A row per position of each image, in the order of the patches.
        rows = g.movedim(2, -1).reshape(clients, self.patches.shape[2], -1)
        before = g
        # As in Linear: before the weights change. `fold` adds the contributions of overlapping
        # patches to a pixel.
        if needs_input:
            spread = torch.bmm(rows, self.weight.now.flatten(2))
            columns = spread.view(clients * examples, -1, spread.shape[2]).transpose(1, 2)
            how = (self.dilation, self.padding, self.stride)
            before = F.fold(columns, (height, width), self.weight.shape[2:], *how).view(self.images)
        self.weight.product(rows.transpose(1, 2), self.patches.transpose(1, 2))
        if self.bias is not None:
            self.bias.sum(rows.sum(1))
        return before


class Convolution(BatchedLayer):
    """Batched nn.Conv2d by torch's own kernels, client by client."""

    trained = True

    def __init__(
        self, weight: Weights, bias: Weights | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.how = (stride, padding, dilation)
        self.x: list[Tensor] = []

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        weights = self.weight.now.unbind(0)
        biases = self.bias.now.unbind(0) if self.bias is not None else [None] * len(x)
        # Padding rows are not computed, and are zeros in the output.
        self.x = [innermost(images[:size]) for images, size in zip(x.unbind(0), sizes, strict=True)]
        outputs = [
            torch.conv2d(images, weight, bias, *self.how)
            for images, weight, bias in zip(self.x, weights, biases, strict=True)
        ]
        return side_by_side(outputs, x.shape[1])

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        # Not the bias: its gradient is a single sum for all clients, below. Padding rows have
        # gradient 0.
        which = [needs_input, True, False]
        results = [
            torch.ops.aten.convolution_backward(
                innermost(gradient[: len(images)]),
                images,
                weight,
                None,
                *self.how,
                False,
                (0, 0),
                1,
                which,
            )
            for gradient, images, weight in zip(
                g.unbind(0), self.x, self.weight.now.unbind(0), strict=True
            )
        ]
        self.weight.sum(torch.stack([of_weight for _, of_weight, _ in results]))
        if self.bias is not None:
            self.bias.sum(g.movedim(2, -1).flatten(1, 3).sum(1))
        return (
            side_by_side([of_images for of_images, _, _ in results], g.shape[1])
            if needs_input
            else g
        )


class FrozenConvolution(BatchedLayer):
    """Untrained nn.Conv2d: the images of all clients are a single batch."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.how = (stride, padding, dilation)
        self.x = torch.empty(0)

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        self.x = innermost(x.flatten(0, 1))
        outputs = torch.conv2d(self.x, self.weight, self.bias, *self.how)
        return outputs.view(*x.shape[:2], *outputs.shape[1:])

    def backward(self, g: Tensor, needs_input: bool) -> Tensor:
        if not needs_input:
            return g
        before, _, _ = torch.ops.aten.convolution_backward(
            innermost(g.flatten(0, 1)),
            self.x,
            self.weight,
            None,
            *self.how,
            False,
            (0, 0),
            1,
            [True, False, False],
        )
        images: Tensor = before.view(*g.shape[:2], *before.shape[1:])
        return images


def side_by_side(images: Sequence[Tensor], rows: int) -> Tensor:
    """Return the images of A clients in a tensor, (A, rows, C, h, w), padded with zeros."""
    shape = (len(images), rows, *images[0].shape[1:])
    # Equal batches, the usual case, are a single copy; a single client needs no copy.
    if all(len(own) == rows for own in images):
        return (torch.cat(list(images)) if len(images) > 1 else images[0]).view(shape)
    every = innermost(images[0].new_empty(len(images) * rows, *shape[2:])).view(shape)
    for place, own in zip(every.unbind(0), images, strict=True):
        place[: len(own)] = own
        place[len(own) :] = 0
    return every
