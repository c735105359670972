"""Search for the module that computes values that a trace does not compute.

All tensors that the model and the trace compute are compared. The search is slow and runs only if
the outputs of the two are known to differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from dure.parallel.pipeline.model_location import module_at
from dure.parallel.pipeline.opaque_modules import block_function, is_untraced
from dure.parallel.pipeline.trace import ModelTrace, leaves_of
from dure.parallel.tensor.opaque import function_behind, is_opaque
from dure.parallel.tensor_comparison import first_difference
from dure.randomness.seeds import generators_state, restore_generators


@torch.no_grad()
def first_mismatch(model: nn.Module, trace: ModelTrace, inputs: Any) -> str | None:
    """Return the first module that computes a value that no operation of the trace computes.

    None if there is no such module. Both draw from the generators in their present state.
    """
    before = generators_state()
    passed = _passed(model, inputs)
    restore_generators(before)
    leaves = leaves_of(inputs)
    known = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    known += _Recorded(trace).values_of(leaves)
    for name, tensor in passed:
        alike = (value for value in known if value.shape == tensor.shape)
        if all(first_difference({"": tensor}, {"": value}) is not None for value in alike):
            return module_at(model, _users(model, name))
    return None


def _users(model: nn.Module, name: str) -> str:
    """Return the module, or the innermost module around it with code from outside torch."""
    around = name
    while type(model.get_submodule(around)).__module__.startswith("torch."):
        if not around:
            return name
        around = around.rpartition(".")[0]
    return around


def _passed(model: nn.Module, inputs: Any) -> list[tuple[str, Tensor]]:
    """Return inputs and outputs of modules, in order, with the module that made each."""
    found: list[tuple[str, Tensor]] = []
    hooks: list[Any] = []

    def note(name: str, content: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor))
        found.extend((name, tensor.clone()) for tensor in tensors)

    def watch(name: str, module: nn.Module) -> None:
        # The code of the enclosing module made the module's inputs.
        around = name.rpartition(".")[0]
        hooks.append(module.register_forward_pre_hook(lambda _, given: note(around, given)))
        hooks.append(module.register_forward_hook(lambda _, __, given: note(name, given)))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _Recorded(fx.Interpreter):
    """Interpreter of a trace that records every tensor that an operation computes."""

    def __init__(self, trace: ModelTrace) -> None:
        super().__init__(trace.module)
        self._trace = trace

    def values_of(self, leaves: list[Any]) -> list[Tensor]:
        """Return copies of all computed tensors, in the order of the operations."""
        self._values: list[Tensor] = []
        self.run(*leaves)
        return self._values

    def run_node(self, node: fx.Node) -> Any:
        """Run an operation and record its tensors."""
        value = self._value(node)
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        self._values += [tensor.clone() for tensor in tensors]
        return value

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if is_untraced(node):
            return block_function(node, self._trace.blocks)(*args, **kwargs)
        if is_opaque(node):
            return function_behind(node, self._trace.layers)(*args, **kwargs)
        return super().run_node(node)
