"""Separate gradients of inputs and of weights, and weight gradients accumulated inside the product.

    y = x wᵀ:   backward computes  ∂x = ∂y w  at once, and defers  ∂w += ∂yᵀ x , as zero-bubble
                schedules require: no other rank waits for ∂w
                (for complex numbers: the conjugates of w and x)

Three kinds of operations hold nearly all of a model's weight gradients and are split here: linear
layers, products with a weight, convolutions. All other gradients are computed at once. A deferred
gradient keeps x and ∂y alive until it is computed.

If nothing is deferred, products with large weights are split all the same: a micro-batch adds its
part of ∂w inside the product. Autograd allocates a separate matrix and adds it. For micro-batches
of few rows that addition takes a good part of the time of the product, because the matrix is
written, read, and added to a sum that is read and written.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dure.parallel.zero.partitioned_parameters import gradient_of, set_gradient
from dure.tensors.backward import has_hooks

DeferredGradients = list[Callable[[], None]]
"""Weight gradients that are still to be computed, in the order of backward."""

GradientHandler = Callable[[Callable[[], None]], None]
"""Handler of a weight gradient: `DeferredGradients.append` or `compute_now`."""

LONG = 1 << 15
"""Smallest number of elements of a weight for which adding inside the product saves time."""

aten = torch.ops.aten


def compute_now(compute: Callable[[], None]) -> None:
    """Compute a weight gradient as soon as backward reaches it."""
    compute()


def is_split_worthwhile(operation: Any, weight: Tensor, gradient_handler: GradientHandler) -> bool:
    """Return whether a split backward (`split_operation`) saves time.

    If the handler computes gradients at once, only products with large weights save time.
    """
    return gradient_handler is not compute_now or (
        weight.numel() >= LONG and operation in (aten.linear.default, aten.addmm.default)
    )


def split_operation(
    operation: Any, gradient_handler: GradientHandler
) -> tuple[int, Callable[..., Any] | None]:
    """Return the position of the weight in the operation's arguments, and the split operation.

    The split operation hands its weight's gradient to `gradient_handler`. The result is (0, None)
    for an operation without a split form.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        # Checked in every call: hooks may have been added, or the weight frozen, since the program
        # was made.
        if weight.dim() != 2 or not _is_ours(weight):
            return operation(x, weight, bias)
        return _Product.apply(x, weight, bias, True, gradient_handler)  # type: ignore[no-untyped-call]

    def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Any:
        # A bias of another shape is broadcast, which `_Product` does not do.
        if bias.shape != weight.shape[1:] or not _is_ours(weight):
            return operation(bias, x, weight)
        return _Product.apply(x, weight, bias, False, gradient_handler)  # type: ignore[no-untyped-call]

    def convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        # "same" may pad unequally, which the plain operation knows how to do
        if isinstance(padding, str):
            return operation(x, weight, bias, stride, padding, dilation, groups)
        settings = (
            *[_each(each, weight.dim() - 2) for each in (stride, padding, dilation)],
            groups,
        )
        if x.dim() != weight.dim() or weight.is_complex() or not _is_ours(weight):
            return operation(x, weight, bias, *settings)
        return _Convolution.apply(x, weight, bias, settings, gradient_handler)  # type: ignore[no-untyped-call]

    if operation is aten.linear.default:
        return 1, linear
    if operation is aten.addmm.default:
        return 2, addmm
    if operation in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default):
        return 1, convolution
    return 0, None


def _is_ours(weight: Tensor) -> bool:
    """Return whether the weight requires a gradient and has no hooks; both can change by step."""
    return weight.requires_grad and not has_hooks(weight)


def _each(value: Any, dimensions: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dimensions if len(values) == 1 else values


def _add(weight: Tensor, gradient: Tensor) -> None:
    # Not `weight.grad`: with ZeRO, access to that attribute raises an error.
    before = gradient_of(weight)
    set_gradient(weight, gradient if before is None else before.add_(gradient))


def _add_product(weight: Tensor, one: Tensor, other: Tensor) -> None:
    """Add `one @ other` to a weight's gradient, inside the product if possible."""
    before = gradient_of(weight)
    # Only a dense gradient of the same dtype can be the accumulator of the product.
    if before is None or before.dtype != one.dtype or before.layout is not torch.strided:
        _add(weight, one @ other)
    else:
        # The sum is written once; a separate product would be written, read and added.
        before.addmm_(one, other)


class _Product(torch.autograd.Function):
    """Product x w + b with w of shape (in, out), or (out, in) if `across`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        across: bool,
        gradient_handler: GradientHandler,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.across = across
        ctx.gradient_handler = gradient_handler
        # `saved_tensors` may return another tensor object; the gradient belongs to this object.
        ctx.parameter = weight
        return F.linear(x, weight if across else weight.T, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        # as a matrix: batch and sequence dimensions are flattened to rows
        outs = g.reshape(-1, g.shape[-1])

        def compute() -> None:
            rows = x.reshape(-1, x.shape[-1]).conj()
            if ctx.across:
                _add_product(ctx.parameter, outs.T, rows)
            else:
                _add_product(ctx.parameter, rows.T, outs)

        ctx.gradient_handler(compute)
        back = g @ (weight if ctx.across else weight.T).conj() if ctx.needs_input_grad[0] else None
        # None for the weight: autograd must not add what `compute` adds itself.
        return back, None, outs.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _Convolution(torch.autograd.Function):
    """Split convolution; settings: stride, padding, dilation per dimension, and groups."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[Any, ...],
        gradient_handler: GradientHandler,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        ctx.gradient_handler = gradient_handler
        ctx.parameter = weight
        stride, padding, dilation, groups = settings
        out: Tensor = aten.convolution(
            x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings

        def parts(wanted: list[bool]) -> Any:
            settings = (stride, padding, dilation, False, [0] * len(stride), groups)
            return aten.convolution_backward(g, x, weight, [len(weight)], *settings, wanted)

        ctx.gradient_handler(lambda: _add(ctx.parameter, parts([False, True, False])[1]))
        back, _, bias = parts([ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]])
        # None for the weight, as in `_Product`
        return back, None, bias, None, None
