"""Preprocessing operations before a model's first layer, computed once for all examples.

    x["numbers"]    torch.cat([x["a"], x["b"]], 1)    x[1].unsqueeze(1).float()

These operations join a dict or a tuple of tensors into the tensor that a chain of layers takes.
Each operation has to treat every example independently, which is checked on a few examples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from dure.federated.engines.sgd import CannotBatchError

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(operator.getitem, torch.cat, torch.concat, torch.stack, torch.unsqueeze, F.one_hot),
    *(torch.flatten, torch.reshape),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.neg),
)
METHODS = frozenset({"float", "double", "to", "unsqueeze", "flatten", "view", "reshape"})

TRIED = 3
"""Number of examples on which the operations are checked."""


class Preprocessing:
    """Operations of a graph that depend on its inputs alone."""

    def __init__(self, given: fx.Node) -> None:
        self.given = given
        self.nodes = [given]

    def takes(self, node: fx.Node) -> bool:
        """Return whether the operation is a preprocessing operation, and record it."""
        known = (node.op == "call_function" and node.target in FUNCTIONS) or (
            node.op == "call_method" and node.target in METHODS
        )
        behind = node.all_input_nodes
        if not known or not behind or not all(one in self.nodes for one in behind):
            return False
        self.nodes.append(node)
        return True

    def tensor_of(self, inputs: Any, wanted: fx.Node) -> Tensor:
        """Return the value of `wanted` for all examples.

        Raises CannotBatchError if the value is not a tensor with an independent row per example.
        """
        count = len(tree_leaves(inputs)[0])
        whole = self._value(inputs, wanted)
        if not isinstance(whole, Tensor) or whole.ndim == 0 or len(whole) != count:
            raise CannotBatchError("the inputs do not become one tensor before the first layer")
        for first in range(min(TRIED, count)):
            some = tree_map(lambda leaf, at=first: leaf[at : at + 2], inputs)
            if not torch.equal(self._value(some, wanted), whole[first : first + 2]):
                raise CannotBatchError("the model mixes examples before its first layer")
        return whole

    def _value(self, inputs: Any, wanted: fx.Node) -> Any:
        values: dict[fx.Node, Any] = {self.given: inputs}
        try:
            with torch.no_grad():
                for node in self.nodes[1:]:
                    args, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    target: Any = node.target
                    if node.op == "call_method":
                        target = getattr(args[0], str(target))
                        args = args[1:]
                    values[node] = target(*args, **named)
        except Exception as error:
            raise CannotBatchError(
                f"the model's forward fails before its layers: {error}"
            ) from error
        return values[wanted]
