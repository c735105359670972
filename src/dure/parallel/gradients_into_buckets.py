"""Gradients of large weights, computed directly in the buffers that are sent.

Autograd allocates memory for each gradient, and the copy into the bucket takes as long as the sum.
The gradient of a linear layer's weight is a matrix product, gᵀx, and a matrix product can write
its result anywhere: into the weight's place in the bucket, so that no copy is needed. Megatron-LM
calls this technique gradient accumulation fusion.

The graph does not change. After each forward pass the nodes that compute such products are found
in the graph, and hooks around a node direct its matrix product to the place in the bucket. All
else remains autograd's work: hooks, the sum with other contributions, the assignment to `.grad`. A
gradient that ends up elsewhere is copied like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WORTH_IT = 4 << 20
"""Bytes from which on a copy takes longer than Python needs to inspect a node."""

PRODUCTS = ("AddmmBackward0", "MmBackward0")


class MatmulInto(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that writes the first matrix product with the shape of `place` into `place`."""

    def __init__(self, place: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: Tensor | None = place

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place = self.place
        # With gradients enabled the product belongs to a forward pass that is recomputed.
        if (
            function is torch.ops.aten.mm.default
            and place is not None
            and not torch.is_grad_enabled()
        ):
            one, other = args
            if (one.shape[0], other.shape[1]) == place.shape and one.dtype == place.dtype:
                # once: a second product of this shape belongs to something else
                self.place = None
                # detached: a new tensor object, which autograd can take as the gradient
                return torch.ops.aten.mm.out(one, other, out=place.detach())
        return function(*args, **(kwargs or {}))


class GradientsIntoBuckets:
    """Large weights among `parameters` whose gradients are computed in their place in a bucket.

    place_of: returns the memory that a parameter's gradient is sent from; None if it is unknown.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], place_of: Callable[[nn.Parameter], Tensor | None]
    ) -> None:
        self._place_of = place_of
        self.weights = {
            id(parameter): parameter
            for parameter in parameters
            if parameter.dim() == 2 and parameter.nbytes >= WORTH_IT and parameter.is_contiguous()
        }
        # by weight: the last backward pass in which a product wrote into its place
        self._passes: dict[int, int] = {}

    def prepare(self, outputs: Iterable[Tensor]) -> None:
        """Find the matrix products of the weights in the graph of a forward pass and hook them."""
        if not self.weights or torch.compiler.is_compiling():
            return
        # An explicit stack: graphs are deeper than Python's recursion limit.
        stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen: set[Any] = set(stack)
        while stack:
            node = stack.pop()
            following = node.next_functions
            for child, _ in following:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
            if type(node).__name__ in PRODUCTS:  # quicker than node.name()
                self._prepare(node, following[-1][0])

    def _prepare(self, node: Any, transposed: Any) -> None:
        # A linear layer multiplies by the weight's transpose: the path of the gradient ends in a
        # transposition, and then in the leaf. Autograd computes any other form.
        if type(transposed).__name__ == "TBackward0":
            leaf = transposed.next_functions[0][0]
            weight = self.weights.get(id(getattr(leaf, "variable", None)))
            if weight is not None:
                self._watch(node, leaf, weight)

    def _watch(self, node: Any, leaf: Any, weight: nn.Parameter) -> None:
        # a list, shared by both hooks of the node; empty if this pass has no place to write to
        entered: list[MatmulInto] = []

        def before(gradients: Any) -> None:
            if gradients[0] is None or gradients[0].shape[0] == weight.shape[0]:
                # the gradient of the layer's input may have the weight's shape, and comes first
                return
            place = self._place_for(leaf, weight)
            if place is not None:
                entered.append(MatmulInto(place).__enter__())  # type: ignore[no-untyped-call]

        def after(gradients: Any, _: Any) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        node.register_prehook(before)
        node.register_hook(after)

    def _place_for(self, leaf: Any, weight: nn.Parameter) -> Tensor | None:
        """Return the memory for the weight's gradient in this pass; None: autograd allocates it.

        Only the first product of a weight in a pass may write, and only if the gradient is
        accumulated into the weight.
        """
        current = torch._C._current_graph_task_id()
        if (
            # autograd would add the new gradient to the old gradient, which is in that very place;
            # create_graph keeps the product; a weight that is used twice has two products
            weight.grad is not None
            or torch.is_grad_enabled()
            or self._passes.get(id(weight)) == current
        ):
            return None
        try:
            # backward(inputs=...) may leave the weight out
            if not torch._C._will_engine_execute_node(leaf):
                return None
        except RuntimeError:  # the call is torch.autograd.grad
            return None
        self._passes[id(weight)] = current
        return self._place_of(weight)
