"""Plans that divide every linear layer of a chain, in one of three ways.

A chain is a sequence of linear layers with only element-wise operations between them, in an
`nn.Sequential` or in nested ones; in other models a trace of `torch.fx` finds the chains. Inputs
and outputs of a chain are whole on every rank. Layer l has n_l numbers of output, for all examples
together. There are L layers and N ranks.

    plan         Y = X·A          Y = W·X        between two layers
    columns      A by columns     row-wise       outputs are parts: all-gather of features;
                                                 backward a reduce-scatter of their gradient
    rows         A by rows        column-wise    outputs are sums: reduce-scatter of features;
                                                 backward an all-gather of their gradient
    alternating  columns, rows,…  alternately    nothing, then an all-reduce; backward the same

Numbers that a rank sends, if the gradient of the chain's inputs is not needed:

    plan         forward                                backward
    columns      (N-1)/N·(n_1 + … + n_L)                (N-1)/N·(n_1 + … + n_(L-1))
    rows         (N-1)/N·(n_1 + … + n_(L-1) + 2 n_L)    (N-1)/N·(n_1 + … + n_(L-1))
    alternating  2(N-1)/N·(n_2 + n_4 + …)               2(N-1)/N·(n_2 + n_4 + …), without n_L

An alternating chain with an odd number of layers ends with a layer by columns, whose n_L outputs
are gathered: (N-1)/N·n_L. So for equal widths the three plans send nearly as much: an all-reduce
over every second boundary is a reduce-scatter and an all-gather. Alternation is best if the wide
boundaries are between a column and its row, like the 4d of an MLP d→4d→d: those values never
travel.

The degree must divide the features of every boundary between two layers; with `columns` also the
outputs of the last layer, with `rows` also the inputs of the first layer.

Sources: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism" (the alternation); Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", section 2.3 (its reason).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from dure.contracts.adapter import is_adapted
from dure.parallel.tensor.divided import is_transposed
from dure.parallel.tensor.plan import Column, DivisionPlan, PlanEntry, Row

ELEMENT_WISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.ReLU6,
    nn.Softplus,
    nn.Mish,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid,
    nn.Softsign,
    nn.Dropout,
    nn.Identity,
)
"""Modules that may be between two layers of a chain."""

_FUNCTIONS = {
    *(F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.leaky_relu, F.elu, F.selu, F.celu, F.relu6),
    *(F.softplus, F.mish, F.hardtanh, F.hardswish, F.hardsigmoid, F.logsigmoid, F.softsign),
    *(F.dropout, torch.relu, torch.tanh, torch.sigmoid),
}
"""Element-wise functions of a tensor that may be between two layers of a chain."""

_METHODS = {"relu", "tanh", "sigmoid"}


class _Tracer(fx.Tracer):
    """Tracer for which an adapted layer is a single layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_adapted(m) or super().is_leaf_module(m, module_qualified_name)


Chain: TypeAlias = Sequence[str]
"""Names of linear layers, in order."""


def chains_of(layers: nn.Sequential, prefix: str = "") -> list[list[str]]:
    """Return the longest chains in a Sequential, by the names of their layers after `prefix`.

    A layer at several positions is part of no chain: it would be divided in several ways.
    """
    places = list(_places(layers, prefix))
    chains: list[list[str]] = []
    reached = False
    for name, layer in places:
        once = sum(layer is other for _, other in places) == 1
        if once and is_linear(layer):
            if not reached:
                chains.append([])
            chains[-1].append(name)
            reached = True
        # Another kind of layer combines the outputs, so they must be whole before it.
        elif type(layer) not in ELEMENT_WISE:
            reached = False
    return chains


def traced_chains(model: nn.Module) -> list[list[str]]:
    """Return the longest chains of a model that `torch.fx` can trace, by the names of their layers.

    Raises ValueError if `torch.fx` cannot trace the model.
    """
    try:
        graph = _Tracer().trace(model)
    # The user's code may raise any error with the tracer's proxies.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"this {type(model).__name__} cannot be traced: {reason}") from None
    calls = [node for node in graph.nodes if node.op == "call_module"]
    layers = {node: model.get_submodule(str(node.target)) for node in calls}
    times = Counter(id(layer) for layer in layers.values())
    linear = [node for node in calls if is_linear(layers[node]) and times[id(layers[node])] == 1]
    chains: list[list[str]] = []
    place: dict[fx.Node, list[str]] = {}
    for node in linear:
        before = _reached_from(node, layers)
        # A chain continues if its last layer's outputs are the only inputs of this layer.
        chain = place.get(before, []) if before is not None else []
        if not chain:
            chains.append(chain)
        chain.append(str(node.target))
        place[node] = chain
    return chains


def _reached_from(node: fx.Node, layers: Mapping[fx.Node, nn.Module]) -> fx.Node | None:
    """Return the layer whose outputs alone, element by element, are the inputs of this layer."""
    given = node.all_input_nodes
    while len(given) == 1 and len(given[0].users) == 1:
        (before,) = given
        if before in layers and is_linear(layers[before]):
            return before
        if not _is_element_wise(before, layers):
            return None
        given = before.all_input_nodes
    return None


def _is_element_wise(node: fx.Node, layers: Mapping[fx.Node, nn.Module]) -> bool:
    if node.op == "call_module":
        return type(layers[node]) in ELEMENT_WISE
    known = _FUNCTIONS if node.op == "call_function" else _METHODS
    return node.op.startswith("call_") and node.target in known


def is_sequential(module: nn.Module) -> bool:
    """Return whether a module only calls its children one after another."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _places(layers: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Return every layer with its name, in the order of the calls."""
    # Not `named_children`, which returns a layer once, however often it is called.
    for name, layer in layers._modules.items():
        if layer is None:
            continue
        if isinstance(layer, nn.Sequential) and is_sequential(layer):
            yield from _places(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer that can be divided, with its adapter if any."""
    layer = layer.base_layer if is_adapted(layer) else layer  # type: ignore[assignment]
    try:
        is_transposed(layer)
    except ValueError:
        return False
    return True


def pairs(chain: Chain) -> dict[str, PlanEntry]:
    """Return layers by columns and by rows in turn; the last layer of an odd number stays whole."""
    plan: dict[str, PlanEntry] = {}
    for first, second in zip(chain[::2], chain[1::2], strict=False):
        plan[first] = Column()
        plan[second] = Row()
    return plan


def columns(chain: Chain) -> dict[str, PlanEntry]:
    """Return every layer by columns."""
    last = chain[-1]
    return {name: Column(gather_output=name == last, features=name != chain[0]) for name in chain}


def rows(chain: Chain) -> dict[str, PlanEntry]:
    """Return every layer by rows."""
    last = chain[-1]
    return {name: Row(input_is_parallel=name != chain[0], features=name != last) for name in chain}


def alternating(chain: Chain) -> dict[str, PlanEntry]:
    """Return the plan of `pairs`, with the last layer of an odd number by columns."""
    plan = pairs(chain)
    if len(chain) % 2:
        plan[chain[-1]] = Column(gather_output=True)
    return plan


MAKERS: dict[str, Callable[[Chain], dict[str, PlanEntry]]] = {
    "columns": columns,
    "rows": rows,
    "alternating": alternating,
}
"""Functions that make the plans, by name."""


def chain_plan(name: str, model: nn.Module) -> DivisionPlan:
    """Return the plan of that name for all chains of a model.

    Raises ValueError if the model has no linear layer, or if `torch.fx` cannot trace it.
    """
    if isinstance(model, nn.Sequential) and is_sequential(model):
        chains = chains_of(model)
    else:
        chains = traced_chains(model)
    plan: dict[str, PlanEntry] = {}
    for chain in chains:
        plan |= MAKERS[name](chain)
    if not plan:
        raise ValueError(
            f"the plan {name} divides linear layers, but this {type(model).__name__} has none "
            "that can be divided"
        )
    return plan
