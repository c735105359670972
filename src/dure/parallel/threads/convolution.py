"""Convolution as a matrix product: im2col copies the patch under each output pixel into a column.

X (B, C, H, W), kernels W (Co, C, kh, kw), stride s, padding p, dilation d. An output has
oh = ⌊(H + 2p - d(kh - 1) - 1) / s⌋ + 1 rows, and columns likewise. With cols = im2col(X) of shape
(C·kh·kw, B·oh·ow) and W as a matrix (Co, C·kh·kw):

    forward     Y  = W · cols + b
    backward    dW = dY · colsᵀ      db = the sums of dY's rows      dX = col2im(Wᵀ · dY)

col2im adds each column back to the pixels that it was copied from. It is the adjoint of im2col,
⟨im2col(x), y⟩ = ⟨x, col2im(y)⟩, and col2im(im2col(x)) is x times the number of patches that contain
each pixel. With g groups there are g such products, each of C/g channels with Co/g kernels.

Cost: 2·Co·(C/g)·kh·kw·oh·ow·B operations forward and twice as many backward, all in matrix
products, which BLAS computes near the peak of the machine. The price is memory: cols has about
kh·kw/s² times the elements of X. Therefore cols is computed for a part of the batch at a time, and
recomputed in backward instead of stored.

Source: K. Chellapilla, S. Puri, P. Simard, "High Performance Convolutional Neural Networks for
Document Processing", IWFHR 2006.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

Pair = int | tuple[int, int]

AT_ONCE = 1 << 20
"""Elements of the columns that are computed at once on a CPU: few enough to stay in its cache."""

ON_DEVICE = 1 << 26
"""Elements of the columns that are computed at once on an accelerator."""


class ConvolutionWindow(NamedTuple):
    """Geometry of a convolution; each field is (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        """Return (oh, ow) for an image of `height` x `width` pixels.

        Raises ValueError if the image is smaller than the kernel.
        """
        sizes = [self._outputs(axis, size) for axis, size in enumerate((height, width))]
        if min(sizes) < 1:
            raise ValueError(
                f"an image of {height}x{width} pixels with padding {self.padding} is smaller than "
                "the kernel"
            )
        return sizes[0], sizes[1]

    def _outputs(self, axis: int, size: int) -> int:
        # pixels from the kernel's first to its last element
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    def taps(self, height: int, width: int) -> Iterator[tuple[int, int, slice, slice]]:
        """Yield (i, j, rows, columns) for each element (i, j) of the kernel.

        rows and columns are slices of the padded image: the pixels that the element is multiplied
        with.
        """
        oh, ow = self.outputs(height, width)
        sh, sw = self.stride
        dh, dw = self.dilation
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                # Rows under the kernel's element (i, j): one row for each output row, `sh` apart.
                rows = slice(i * dh, i * dh + (oh - 1) * sh + 1, sh)
                yield i, j, rows, slice(j * dw, j * dw + (ow - 1) * sw + 1, sw)


def window(
    kernel: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1
) -> ConvolutionWindow:
    """Return a window from single numbers or pairs.

    Raises ValueError for a padding below 0, and for other values below 1.
    """
    made = ConvolutionWindow(*map(_pair, (kernel, stride, padding, dilation)))
    for name, values, least in zip(ConvolutionWindow._fields, made, (1, 1, 0, 1), strict=True):
        if min(values) < least:
            raise ValueError(
                f"the {name} of a convolution has to be at least {least}, not {values}"
            )
    return made


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def im2col(
    images: Tensor, kernel: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1
) -> Tensor:
    """Return the patches as columns: (C·kh·kw, B·oh·ow) for images (B, C, H, W).

    Row (c, i, j) has the pixels of channel c under the kernel's element (i, j); column (b, y, x) is
    an output pixel. Raises ValueError if the images are smaller than the kernel.
    """
    return _im2col(images, window(kernel, stride, padding, dilation))


def col2im(
    columns: Tensor,
    shape: tuple[int, int, int, int],
    kernel: Pair,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> Tensor:
    """Add the columns back to the pixels that `im2col` takes them from.

    Returns images of `shape` (B, C, H, W). Raises ValueError unless the columns have the shape that
    `im2col` returns for such images.

    Args:
        columns: (C·kh·kw, B·oh·ow).
        shape: (B, C, H, W).
        kernel: (kh, kw), or a single number for both.
        stride: Likewise.
        padding: Likewise.
        dilation: Likewise.
    """
    return _col2im(columns, shape, window(kernel, stride, padding, dilation))


def _im2col(images: Tensor, over: ConvolutionWindow) -> Tensor:
    b, c, height, width = images.shape
    kh, kw = over.kernel
    oh, ow = over.outputs(height, width)
    ph, pw = over.padding
    padded = pad(images, (pw, pw, ph, ph)) if ph or pw else images
    # channels first, so that a row of the columns is one channel's pixel under one tap
    channels = padded.transpose(0, 1)
    columns = images.new_empty(c, kh, kw, b, oh, ow)
    # One strided copy for each element of the kernel: far fewer than one for each patch.
    for i, j, rows, across in over.taps(height, width):
        columns[:, i, j] = channels[:, :, rows, across]
    return columns.view(c * kh * kw, b * oh * ow)


def _col2im(columns: Tensor, shape: tuple[int, int, int, int], over: ConvolutionWindow) -> Tensor:
    b, c, height, width = shape
    kh, kw = over.kernel
    oh, ow = over.outputs(height, width)
    ph, pw = over.padding
    if columns.shape != (c * kh * kw, b * oh * ow):
        raise ValueError(
            f"columns have the shape {tuple(columns.shape)}, expected {(c * kh * kw, b * oh * ow)}"
        )
    patches = columns.view(c, kh, kw, b, oh, ow)
    padded = columns.new_zeros(b, c, height + 2 * ph, width + 2 * pw)
    channels = padded.transpose(0, 1)
    for i, j, rows, across in over.taps(height, width):
        # Patches overlap: the contributions of several patches to a pixel add up.
        channels[:, :, rows, across] += patches[:, i, j]
    # The padding is cut off.
    return padded[:, :, ph : ph + height, pw : pw + width]


class _Convolution(torch.autograd.Function):
    """Products of the module's docstring, computed for a part of the batch at a time.

    Groups are the first dimension of each factor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        kernels: Tensor,
        bias: Tensor | None,
        over: ConvolutionWindow,
        groups: int,
        at_once: int,
    ) -> Tensor:
        ctx.save_for_backward(images, kernels)
        ctx.over = over
        ctx.groups = groups
        ctx.at_once = at_once
        co = len(kernels)
        oh, ow = over.outputs(*images.shape[2:])
        # a matrix for each group: its kernels as rows
        matrices = kernels.reshape(groups, co // groups, -1)
        # Written piece by piece, so that the columns of only one piece exist at a time.
        outputs = images.new_empty(len(images), co, oh, ow)
        pieces = zip(torch.split(images, at_once), torch.split(outputs, at_once), strict=True)
        for some, into in pieces:
            # recomputed in backward: stored columns would take kh·kw/s² times the memory of the
            # images
            columns = _im2col(some, over)
            products = matrices @ columns.view(groups, -1, columns.shape[1])
            into.copy_(products.view(co, len(some), oh, ow).transpose(0, 1))
        return outputs if bias is None else outputs.add_(bias.view(-1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, kernels = ctx.saved_tensors
        for_images, for_kernels, for_bias = ctx.needs_input_grad[:3]
        matrices = kernels.reshape(ctx.groups, len(kernels) // ctx.groups, -1)
        d_images = torch.empty_like(images) if for_images else None
        d_matrices = torch.zeros_like(matrices) if for_kernels else None
        for first in range(0, len(images), ctx.at_once):
            which = slice(first, first + ctx.at_once)
            some = images[which]
            # channels first, then divided into groups, like the columns
            d_outputs = gradient[which].transpose(0, 1).reshape(*matrices.shape[:2], -1)
            if d_matrices is not None:
                columns = _im2col(some, ctx.over)
                of_groups = columns.view(ctx.groups, -1, columns.shape[1])
                # accumulated inside the product, over the pieces of the batch
                d_matrices.baddbmm_(d_outputs, of_groups.transpose(1, 2))
            if d_images is not None:
                d_columns = matrices.transpose(1, 2) @ d_outputs
                d_images[which] = _col2im(
                    d_columns.view(-1, d_columns.shape[2]), tuple(some.shape), ctx.over
                )
        d_kernels = None if d_matrices is None else d_matrices.view(kernels.shape)
        return d_images, d_kernels, gradient.sum((0, 2, 3)) if for_bias else None, None, None, None


def conv2d_im2col(
    images: Tensor,
    kernels: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    at_once: int | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.conv2d` as a matrix product. Differentiable once.

    Args:
        images: (B, C, H, W).
        kernels: (Co, C / groups, kh, kw).
        bias: (Co,); None for no bias.
        stride: A number, or (vertical, horizontal).
        padding: Likewise.
        dilation: Likewise.
        groups: Groups of channels.
        at_once: Images whose columns are computed at once; None for about `AT_ONCE` elements.

    Returns:
        (B, Co, oh, ow).

    Raises:
        ValueError: for shapes that do not match, and for images that are smaller than the kernel.
    """
    if images.ndim != 4 or kernels.ndim != 4:
        raise ValueError(
            f"images have the shape (B, C, H, W) and kernels (Co, C / groups, kh, kw), "
            f"not {tuple(images.shape)} and {tuple(kernels.shape)}"
        )
    if groups < 1 or len(kernels) % groups or images.shape[1] != kernels.shape[1] * groups:
        raise ValueError(
            f"{images.shape[1]} channels and {len(kernels)} kernels of {kernels.shape[1]} channels "
            f"do not fit into {groups} groups"
        )
    if bias is not None and bias.shape != kernels.shape[:1]:
        raise ValueError(
            f"the bias has the shape {tuple(bias.shape)}, expected {tuple(kernels.shape[:1])}"
        )
    over = window((kernels.shape[2], kernels.shape[3]), stride, padding, dilation)
    oh, ow = over.outputs(images.shape[2], images.shape[3])
    if at_once is None:
        of_an_image = images.shape[1] * kernels.shape[2] * kernels.shape[3] * oh * ow
        # as many images as have about AT_ONCE elements in their columns; at least one
        at_once = (AT_ONCE if images.is_cpu else ON_DEVICE) // max(of_an_image, 1)
    outputs: Tensor = _Convolution.apply(images, kernels, bias, over, groups, max(at_once, 1))  # type: ignore[no-untyped-call]
    return outputs


def conv2d_flops(
    images: tuple[int, int, int, int], kernels: tuple[int, int, int, int], over: ConvolutionWindow
) -> int:
    """Return the operations of a forward pass; a multiplication and an addition are two operations.

    Shapes are those of `conv2d_im2col`. The backward pass has twice as many operations, or equally
    many if the images need no gradient.
    """
    oh, ow = over.outputs(images[2], images[3])
    co, channels, kh, kw = kernels
    return 2 * co * channels * kh * kw * oh * ow * images[0]
