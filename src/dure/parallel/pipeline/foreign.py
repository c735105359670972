"""Which module computes what a trace does not, found by comparing all that both compute.

Slow, and asked only where the two are known to differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from dure.parallel.pipeline.place import module_at
from dure.parallel.pipeline.trace import Trace, leaves_of
from dure.parallel.pipeline.untraced import in_place_of, is_untraced
from dure.parallel.proof import first_difference
from dure.parallel.tensor.opaque import behind, is_opaque
from dure.randomness.seeds import generators_state, restore_generators


@torch.no_grad()
def first_foreign(model: nn.Module, trace: Trace, inputs: Any) -> str | None:
    """The module in which first something is computed that no operation of the trace gives.

    None if there is none. Both draw from the generators as they are.
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
    """The module itself, or the one around it whose code is not torch's: what differs is there."""
    around = name
    while type(model.get_submodule(around)).__module__.startswith("torch."):
        if not around:
            return name
        around = around.rpartition(".")[0]
    return around


def _passed(model: nn.Module, inputs: Any) -> list[tuple[str, Tensor]]:
    """What modules are given and give, in order, with the name of the module whose code made it."""
    found: list[tuple[str, Tensor]] = []
    hooks: list[Any] = []

    def note(name: str, content: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor))
        found.extend((name, tensor.clone()) for tensor in tensors)

    def watch(name: str, module: nn.Module) -> None:
        # What a module is given was made by the code around it.
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
    """Runs a trace, and keeps every tensor that an operation gives."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.module)
        self._trace = trace

    def values_of(self, leaves: list[Any]) -> list[Tensor]:
        """Copies, in the order of the operations."""
        self._values: list[Tensor] = []
        self.run(*leaves)
        return self._values

    def run_node(self, node: fx.Node) -> Any:
        """One operation."""
        value = self._value(node)
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        self._values += [tensor.clone() for tensor in tensors]
        return value

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if is_untraced(node):
            return in_place_of(node, self._trace.blocks)(*args, **kwargs)
        if is_opaque(node):
            return behind(node, self._trace.layers)(*args, **kwargs)
        return super().run_node(node)
