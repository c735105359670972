"""Divided layers in a trace: each is one operation whose inside is not looked into.

What a divided layer computes has messages in it, forward and backward, and a tracer would follow
neither. So while a model is traced (`dure.parallel.pipeline.trace`) each of its divided layers,
each entry into a divided region, and each place where a sequence is cut or joined, is written down
as one operation, with its parameters; when the trace is made into a program, the layer itself is
put back in its place. What leaves it has the shape of a shard, or of the whole.

    opens   1: behind it the divided region has begun; -1: it is over; 0: neither

A model is not cut inside a divided region: what every rank draws for itself there has to end where
it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from dure.collectives.group import Group
from dure.parallel.tensor.functions import check_length
from dure.parallel.tensor.layers import ColumnParallel, Divided, RowParallel
from dure.parallel.tensor.vocabulary import VocabularyEmbedding

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
    """While a model is traced: `function` of `tensor`, of which the trace sees the shape of the
    result alone."""
    layers = _under_way[-1]
    layers.append(function)
    result: Tensor = torch.ops.dure.opaque(
        tensor, list(weights), len(layers) - 1, list(shape), opens
    )
    return result


def is_opaque(node: fx.Node) -> bool:
    return node.target is torch.ops.dure.opaque.default


def opens(node: fx.Node) -> int:
    """1 if a divided region has begun behind this operation, -1 if one is over, else 0."""
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
        layer.forward = _stub(layer)
    try:
        yield found
    finally:
        _under_way.pop()
        for layer in layers:
            del layer.forward


def of_shard(shape: Sequence[int], dim: int, group: Group) -> list[int]:
    """The shape of a rank's shard of a sequence. Raises ValueError if the degree does not divide
    it."""
    made = list(shape)
    check_length(made[dim], group)
    made[dim] //= group.size
    return made


def of_whole(shape: Sequence[int], dim: int, group: Group) -> list[int]:
    """The shape of the sequence of which a rank holds a shard."""
    made = list(shape)
    made[dim] *= group.size
    return made


def _stub(layer: Divided) -> Callable[[Tensor], Tensor]:
    function = type(layer).forward.__get__(layer)
    opening = 0
    if isinstance(layer, ColumnParallel):
        opening = int(layer._how.enters and not layer.gather_output)
    elif isinstance(layer, RowParallel):
        opening = -1

    def stub(tensor: Tensor) -> Tensor:
        weights = list(layer.parameters())  # as the tracer has put them in their place
        return opaque(function, tensor, _shape(layer, tensor), weights, opening)

    return stub


def _shape(layer: Divided, tensor: Tensor) -> list[int]:
    """Of what a layer gives back."""
    embeds = isinstance(layer, VocabularyEmbedding)
    shape = [*(tensor.shape if embeds else tensor.shape[:-1]), _outputs(layer)]
    along: Any = layer.sequence if embeds else layer._how.sequence  # type: ignore[union-attr]
    if along is None:
        return shape
    if isinstance(layer, ColumnParallel):
        return of_whole(shape, along, layer.group) if layer._how.enters else shape
    return of_shard(shape, along, layer.group)


def _outputs(layer: Divided) -> int:
    if isinstance(layer, VocabularyEmbedding):
        return layer.embedding_dim
    if isinstance(layer, ColumnParallel) and not layer.gather_output:
        return layer.sharers * int(
            layer.get_parameter("weight").shape[1 if layer._how.transposed else 0]
        )
    return int(layer.out_features)  # type: ignore[arg-type]
