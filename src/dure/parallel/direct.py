"""Gradients of long weights, computed where they leave from.

Autograd makes each gradient in memory of its own, and to copy it into its bucket takes as long as
to sum it. The gradient of a linear layer's weight is one matrix product, gᵀx, and a product can be
written anywhere: into the weight's place in its bucket, so that nothing is copied. Megatron-LM
calls this gradient accumulation fusion.

The graph itself stays as it is. Once in each forward pass the nodes that make such products are
looked up in it, and while one of them runs, its matrix product is told where to write. All else is
autograd's own: it calls hooks, adds other contributions, and gives the tensor to the parameter as
its gradient. A gradient that ends up elsewhere is copied like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WORTH_IT = 4 << 20
"""Bytes from which on a copy takes longer than Python needs to look into a node."""

PRODUCTS = ("AddmmBackward0", "MmBackward0")


class Into(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the first matrix product of the place's shape is written there."""

    def __init__(self, place: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: Tensor | None = place

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place = self.place
        # With gradients it is a product of a forward pass, which is computed again for this node.
        if (
            function is torch.ops.aten.mm.default
            and place is not None
            and not torch.is_grad_enabled()
        ):
            one, other = args
            if (one.shape[0], other.shape[1]) == place.shape and one.dtype == place.dtype:
                # once: a second product of this shape is that of something else
                self.place = None
                # detached: a tensor of its own, which autograd can take as the gradient
                return torch.ops.aten.mm.out(one, other, out=place.detach())
        return function(*args, **(kwargs or {}))


class Direct:
    """The long weights among `parameters`.

    place_of: where a parameter's gradient leaves from; None where that is not known.
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
        # by weight: the last backward pass in which its place was given away
        self._passes: dict[int, int] = {}

    def prepare(self, outputs: Iterable[Tensor]) -> None:
        """Looks for the products in the graph of a forward pass."""
        if not self.weights or torch.compiler.is_compiling():
            return
        # A stack of our own: graphs are deeper than Python recurses.
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
        # A linear layer multiplies by the weight's transpose: the path of its gradient ends in a
        # transposition, and then in the leaf. Any other form is left to autograd.
        if type(transposed).__name__ == "TBackward0":
            leaf = transposed.next_functions[0][0]
            weight = self.weights.get(id(getattr(leaf, "variable", None)))
            if weight is not None:
                self._watch(node, leaf, weight)

    def _watch(self, node: Any, leaf: Any, weight: nn.Parameter) -> None:
        # a list, for both hooks of the node; empty where this pass writes nowhere
        entered: list[Into] = []

        def before(gradients: Any) -> None:
            if gradients[0] is None or gradients[0].shape[0] == weight.shape[0]:
                # the gradient of the layer's input may have the weight's shape, and comes first
                return
            place = self._place_for(leaf, weight)
            if place is not None:
                entered.append(Into(place).__enter__())  # type: ignore[no-untyped-call]

        def after(gradients: Any, _: Any) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        node.register_prehook(before)
        node.register_hook(after)

    def _place_for(self, leaf: Any, weight: nn.Parameter) -> Tensor | None:
        """Where this pass may write.

        Only the weight's first product of a pass may, and only if the gradient is for the weight.
        """
        current = torch._C._current_graph_task_id()
        if (
            # autograd would add the new gradient to the old one, which lies in that very place;
            # with create_graph it keeps the product; a weight that is used twice has two products
            weight.grad is not None
            or torch.is_grad_enabled()
            or self._passes.get(id(weight)) == current
        ):
            return None
        try:
            # backward(inputs=...) may leave the weight out
            if not torch._C._will_engine_execute_node(leaf):
                return None
        except RuntimeError:  # torch.autograd.grad asks for it
            return None
        self._passes[id(weight)] = current
        return self._place_of(weight)
