"""Divided layers in a trace: each is one operation whose inside is not looked into.

What a divided layer computes has messages in it, forward and backward, and a tracer would follow
neither. So while a model is traced (`dure.parallel.pipeline.trace`) each of its divided layers,
each entry into a divided region, and each place where a sequence is cut or joined, is written down
as one operation, with its parameters; when the trace is made into a program, the layer itself is
put back in its place. What leaves it has the shape of a shard, or of the whole.

    opens   1: after it the divided region has begun; -1: it is over; 0: neither

A model is not cut inside a divided region: what every rank draws for itself there has to end where
it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from dure.parallel.tensor.divided import Divided

Layers = list[Callable[[Tensor], Tensor]]
"""What the opaque operations of a trace stand for, by number."""

_under_way: list[Layers] = []
"""Of the traces that are being made."""


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
    """Whether a model is traced here, and not by somebody else."""
    return bool(_under_way)


def opaque(
    function: Callable[[Tensor], Tensor],
    tensor: Tensor,
    shape: Sequence[int],
    weights: Sequence[Tensor] = (),
    opens: int = 0,
) -> Tensor:
    """While a model is traced: `function` of `tensor`, of which the trace sees shapes alone.

    shape: of the result. weights: the parameters that it uses. opens: see above.
    """
    # of the innermost trace, which is the one that is being made
    layers = _under_way[-1]
    layers.append(function)
    result: Tensor = torch.ops.dure.opaque(
        tensor, list(weights), len(layers) - 1, list(shape), opens
    )
    return result


def is_opaque(node: fx.Node) -> bool:
    """Whether a node stands for a layer that is not looked into."""
    return node.target is torch.ops.dure.opaque.default


def opens(node: fx.Node) -> int:
    """1 if a divided region has begun after this operation, -1 if one is over, else 0."""
    return int(str(node.args[4])) if is_opaque(node) else 0


def behind(node: fx.Node, layers: Layers) -> Callable[..., Tensor]:
    """What stands behind an opaque operation, to be called in its place. layers: of its trace."""
    function = layers[int(str(node.args[2]))]

    def layer(tensor: Tensor, *_: Any) -> Tensor:
        return function(tensor)

    return layer


@contextmanager
def hidden(model: nn.Module) -> Iterator[Layers]:
    """Inside, the divided layers of a model are opaque; what they stand for is in the list."""
    found: Layers = []
    _under_way.append(found)
    layers = [module for module in model.modules() if isinstance(module, Divided)]
    for layer in layers:
        # on the instance, which hides the class's own until it is deleted
        layer.forward = _stub(layer)
    try:
        yield found
    finally:
        _under_way.pop()
        for layer in layers:
            del layer.forward


def _stub(layer: Divided) -> Callable[[Tensor], Tensor]:
    # the class's own, bound: not the stub
    function = type(layer).forward.__get__(layer)

    def stub(tensor: Tensor) -> Tensor:
        # The tracer has put its own tensors in the parameters' place by now.
        weights = list(layer.parameters())
        shape = layer.output_shape(tensor.shape)
        return opaque(function, tensor, shape, weights=weights, opens=layer.opens)

    return stub
