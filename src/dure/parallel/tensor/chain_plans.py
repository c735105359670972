"""Plans that divide every linear layer of a chain, in one of three ways.

A chain is linear layers with only element-wise operations between them, in an `nn.Sequential` or in
several inside of each other; in other models it is found in a trace of `torch.fx`. Its inputs are
whole on every rank, and so are its outputs. Layer l has n_l numbers of output, those of all
examples together, and there are L layers; N ranks.

    plan         Y = X·A          Y = W·X        between two layers
    columns      A by columns     row-wise       outputs are parts: all-gather of features;
                                                 backward a reduce-scatter of their gradient
    rows         A by rows        column-wise    outputs are sums: reduce-scatter of features;
                                                 backward an all-gather of their gradient
    alternating  columns, rows,…  alternately    nothing, then an all-reduce; backward the same

A rank sends, if nobody asks for the gradient of the chain's inputs:

    plan         forward                                backward
    columns      (N-1)/N·(n_1 + … + n_L)                (N-1)/N·(n_1 + … + n_(L-1))
    rows         (N-1)/N·(n_1 + … + n_(L-1) + 2 n_L)    (N-1)/N·(n_1 + … + n_(L-1))
    alternating  2(N-1)/N·(n_2 + n_4 + …)               2(N-1)/N·(n_2 + n_4 + …), without n_L

An alternating chain of an odd number of layers ends with one by columns, whose n_L outputs are
gathered: (N-1)/N·n_L. So for widths that are all alike the three send nearly as much: an all-reduce
over every second boundary is a reduce-scatter and an all-gather. Alternation wins where wide layers
are those between a column and its row, as the 4d of an MLP d→4d→d: what is there never travels.

The degree has to divide the features of every boundary between two layers; with `columns` the
outputs of the last layer too, with `rows` the inputs of the first.

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

from dure.parallel.tensor.divided import is_transposed
from dure.parallel.tensor.plan import Column, Kind, Plan, Row

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
"""What may stand between two layers of a chain."""

_FUNCTIONS = {
    *(F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.leaky_relu, F.elu, F.selu, F.celu, F.relu6),
    *(F.softplus, F.mish, F.hardtanh, F.hardswish, F.hardsigmoid, F.logsigmoid, F.softsign),
    *(F.dropout, torch.relu, torch.tanh, torch.sigmoid),
}
"""The same as functions, of one tensor each."""

_METHODS = {"relu", "tanh", "sigmoid"}

Chain: TypeAlias = Sequence[str]
"""Names of linear layers, in order."""


def chains_of(layers: nn.Sequential, prefix: str = "") -> list[list[str]]:
    """The longest chains in a Sequential, by the names of their layers after `prefix`.

    A layer that stands in several places is part of none: it would be divided in several ways.
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
        # Something else uses the outputs together: they have to be whole before it.
        elif type(layer) not in ELEMENT_WISE:
            reached = False
    return chains


def traced_chains(model: nn.Module) -> list[list[str]]:
    """The longest chains of any model that `torch.fx` can trace, by the names of their layers.

    Raises ValueError if it cannot.
    """
    try:
        graph = fx.Tracer().trace(model)
    # It is the user's code, and may do anything with what is no tensor.
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
        # A chain goes on where its last layer is all that this one computes on.
        chain = place.get(before, []) if before is not None else []
        if not chain:
            chains.append(chain)
        chain.append(str(node.target))
        place[node] = chain
    return chains


def _reached_from(node: fx.Node, layers: Mapping[fx.Node, nn.Module]) -> fx.Node | None:
    """The layer whose outputs alone, element by element, are this one's inputs."""
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
    """Whether a module does nothing but call its children one after another."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _places(layers: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Every layer with its name, in the order in which they are called."""
    # Not `named_children`, which names a layer once, however often it is called.
    for name, layer in layers._modules.items():
        if layer is None:
            continue
        if isinstance(layer, nn.Sequential) and is_sequential(layer):
            yield from _places(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer can be divided."""
    try:
        is_transposed(layer)
    except ValueError:
        return False
    return True


def pairs(chain: Chain) -> dict[str, Kind]:
    """A layer by columns and one by rows in turn; the last of an odd number stays whole."""
    plan: dict[str, Kind] = {}
    for first, second in zip(chain[::2], chain[1::2], strict=False):
        plan[first] = Column()
        plan[second] = Row()
    return plan


def columns(chain: Chain) -> dict[str, Kind]:
    """Every layer by columns."""
    last = chain[-1]
    return {name: Column(gather_output=name == last, features=name != chain[0]) for name in chain}


def rows(chain: Chain) -> dict[str, Kind]:
    """Every layer by rows."""
    last = chain[-1]
    return {name: Row(input_is_parallel=name != chain[0], features=name != last) for name in chain}


def alternating(chain: Chain) -> dict[str, Kind]:
    """As `pairs`, and the last of an odd number by columns."""
    plan = pairs(chain)
    if len(chain) % 2:
        plan[chain[-1]] = Column(gather_output=True)
    return plan


MAKERS: dict[str, Callable[[Chain], dict[str, Kind]]] = {
    "columns": columns,
    "rows": rows,
    "alternating": alternating,
}
"""The plans, by name."""


def chain_plan(name: str, model: nn.Module) -> Plan:
    """The plan of that name for all chains of a model.

    Raises ValueError if the model has no linear layer, or cannot be looked through.
    """
    if isinstance(model, nn.Sequential) and is_sequential(model):
        chains = chains_of(model)
    else:
        chains = traced_chains(model)
    plan: dict[str, Kind] = {}
    for chain in chains:
        plan |= MAKERS[name](chain)
    if not plan:
        raise ValueError(
            f"the plan {name} divides linear layers, and this {type(model).__name__} has none that "
            "can be divided"
        )
    return plan
