"""Divided layers in a trace: each layer is a single, opaque operation.

A divided layer communicates, forward and backward, and a tracer would record neither. So during
tracing (`dure.parallel.pipeline.trace`) each divided layer, each entry into a divided region, and
each cut or join of a sequence is recorded as a single operation with its parameters. A program made
from the trace calls the layer itself instead. The operation's result has the shape of a shard, or
of the whole tensor.

    opens   1: the divided region begins after it; -1: it ends; 0: neither

A model is not cut inside a divided region: each rank draws different numbers there, and that must
end on the rank on which it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from dure.parallel.tensor.divided import DividedLayer

OpaqueFunctions = list[Callable[[Tensor], Tensor]]
"""Functions behind the opaque operations of a trace, by number."""

_under_way: list[OpaqueFunctions] = []
"""Functions of the traces in progress, the innermost trace last."""


@torch.library.custom_op("dure::opaque", mutates_args=())
def _opaque(
    tensor: Tensor, weights: list[Tensor], number: int, shape: list[int], opens: int
) -> Tensor:
    raise RuntimeError(
        "an opaque operation is part of a trace, and stands for a layer that computes"
    )


@_opaque.register_fake
def _(tensor: Tensor, weights: list[Tensor], number: int, shape: list[int], opens: int) -> Tensor:
    # an embedding's input is of integers, and its output of the weights' dtype
    like = weights[0] if weights else tensor
    return like.new_empty(shape)


def is_tracing() -> bool:
    """Return whether `opaque_layers` is active, that is, whether dure traces a model."""
    return bool(_under_way)


def opaque(
    function: Callable[[Tensor], Tensor],
    tensor: Tensor,
    shape: Sequence[int],
    weights: Sequence[Tensor] = (),
    opens: int = 0,
) -> Tensor:
    """Record `function` of `tensor` as an opaque operation of a trace, which has shapes alone.

    Args:
        function: the function that the operation stands for.
        tensor: its input.
        shape: the shape of the result.
        weights: the parameters that it uses.
        opens: 1 if a divided region begins, -1 if a region ends, 0 otherwise.
    """
    # the functions of the innermost trace, which is the trace in progress
    layers = _under_way[-1]
    layers.append(function)
    result: Tensor = torch.ops.dure.opaque(
        tensor, list(weights), len(layers) - 1, list(shape), opens
    )
    return result


def is_opaque(node: fx.Node) -> bool:
    """Return whether a node stands for an opaque layer."""
    return node.target is torch.ops.dure.opaque.default


def opens(node: fx.Node) -> int:
    """Return 1 if a divided region begins after this operation, -1 if one ends, else 0."""
    return int(str(node.args[4])) if is_opaque(node) else 0


def function_behind(node: fx.Node, layers: OpaqueFunctions) -> Callable[..., Tensor]:
    """Return the function behind an opaque operation. layers: the functions of its trace."""
    function = layers[int(str(node.args[2]))]

    def layer(tensor: Tensor, *_: Any) -> Tensor:
        return function(tensor)

    return layer


@contextmanager
def opaque_layers(model: nn.Module) -> Iterator[OpaqueFunctions]:
    """Context manager: a model's divided layers are opaque operations; yields their functions."""
    found: OpaqueFunctions = []
    _under_way.append(found)
    layers = [module for module in model.modules() if isinstance(module, DividedLayer)]
    for layer in layers:
        # on the instance, which hides the class's forward until the attribute is deleted
        layer.forward = _stub(layer)
    try:
        yield found
    finally:
        _under_way.pop()
        for layer in layers:
            del layer.forward


def _stub(layer: DividedLayer) -> Callable[[Tensor], Tensor]:
    # the class's forward, bound to the layer: not the stub
    function = type(layer).forward.__get__(layer)

    def stub(tensor: Tensor) -> Tensor:
        # By now the tracer has replaced the parameters by its own tensors.
        weights = list(layer.parameters())
        shape = layer.output_shape(tensor.shape)
        return opaque(function, tensor, shape, weights=weights, opens=layer.opens)

    return stub
