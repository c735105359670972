"""Operations of a model as a list: the form in which any model can be cut.

`torch.export` runs the model once on tensors without data and records every operation, with the
parameters, the buffers and the earlier values that it uses. This resolves control flow that depends
on shapes, tuples, dicts, attention masks, skip connections and shared weights: the result is a list
of operations in which values flow forward only. So the model can be cut at any position in the
list.

Operations that change memory are rewritten first (`dure.parallel.pipeline.aliasing`).

A module that cannot be traced is a single operation (`dure.parallel.pipeline.leaf_modules`).

A trace is valid for the shapes and the mode (training or evaluation) in which it was made. It
contains operations and no other effects. If such an effect is detected
(`dure.parallel.pipeline.side_effects`), the module becomes a single operation, or the model is
rejected.

    random     operations that draw: dropout, attention and recurrent layers with dropout, …
    constant   operations whose ancestors contain no parameters and inputs, such as positions and
               masks: every stage that uses a constant computes it, so that it does not travel
"""

from __future__ import annotations

import importlib
import logging
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from dure.errors import first_line
from dure.parallel.pipeline.aliasing import (
    alias_roots,
    attribute,
    changed_by,
    colocated_operations,
    inseparable,
    rewrite_mutations,
    subgraph_of,
)
from dure.parallel.pipeline.leaf_modules import LeafModules
from dure.parallel.pipeline.model_location import modules_of, place_in, place_of
from dure.parallel.pipeline.opaque_modules import (
    OpaqueBlock,
    UntraceableError,
    draws_of,
    is_untraced,
)
from dure.parallel.pipeline.side_effects import record_side_effects
from dure.parallel.pipeline.without_cache import without_cache
from dure.parallel.tensor.functions import LengthError
from dure.parallel.tensor.opaque import OpaqueFunctions, opaque_layers
from dure.parallel.tensor.rng import modules_on_shards
from dure.randomness.seeds import generators_state, restore_generators

TRACES = "torch.export._trace"
"""Module of torch that traces; importing it takes seconds."""

_SYMBOLS = logging.getLogger("torch.fx.experimental.symbolic_shapes")

PLAIN = (Tensor, int, float, bool, type(None))
"""Types of values that an operation may return."""


@dataclass(frozen=True)
class ValueSpec:
    """Shape and type of a tensor without its data. differentiable: whether it may get a gradient.

    order: its dimensions in the order of memory in this trace, the fastest last. Some views of a
    permuted tensor are possible only in that order, so the receiver restores the order of memory of
    a message that arrives in the order of indices.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, differentiable: bool) -> ValueSpec:
        """Return the value of a tensor, which may be without data."""
        return cls(tuple(tensor.shape), tensor.dtype, differentiable, _order(tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor for the value as it travels."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return the same tensor with its memory in the order of `order`."""
        inverse = [self.order.index(dimension) for dimension in range(len(self.order))]
        return tensor.permute(self.order).contiguous().permute(inverse)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in the order of memory; in index order if it has gaps."""
    strides: tuple[int, ...] = tensor.stride()
    # largest stride first; for equal strides the first dimension
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    expected = 1
    for dimension in reversed(order):
        if tensor.shape[dimension] != 1:
            if strides[dimension] != expected:
                # It has gaps or overlaps: no order of dimensions describes it.
                return tuple(range(tensor.dim()))
            expected *= tensor.shape[dimension]
    return tuple(order)


class ModelTrace:
    """Operations of `model` for inputs like `inputs`, in the model's present mode.

    untraced: the modules that are a single operation; more are added if the model cannot be traced
    otherwise. Raises ValueError if the model cannot be traced.
    """

    def __init__(self, model: nn.Module, inputs: Any, untraced: LeafModules | None = None) -> None:
        self.module, self.layers, self.blocks = traced(model, inputs, untraced or LeafModules())
        # First, because it rewrites the graph that all following lines read.
        rewrite_mutations(self.module)
        self._on_shards = modules_on_shards(model)
        nodes = list(self.module.graph.nodes)
        self.root = alias_roots(self.module.graph)
        self.changed: set[fx.Node] = set()
        for node in nodes:
            # Memory that an operation changes, by the value that owns the memory.
            self.changed.update(self.root[value] for value in changed_by(node))
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.operations = [node for node in nodes if node.op == "call_function"]
        # torch.export records the structure of the outputs
        self.structure: TreeSpec = self.module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
        self.outputs: list[Any] = list(self.module.graph.output_node().args[0])  # type: ignore[arg-type]
        self.names = names_of(model, self.module, nodes)
        self.colocated = colocated_operations(self.operations, self.root)
        self._find_constants()

    def _find_constants(self) -> None:
        """Find the values that depend on nothing but constants."""
        # Begin with all operations, and remove those that need a non-constant value until nothing
        # changes. A single pass is not enough: an operation's company may come after it.
        constant = {node for node in self.operations if not (draws(node) or is_untraced(node))}
        # Attributes are constant, except parameters, which are trained, and memory that changes.
        constant.update(
            node
            for node in self.module.graph.nodes
            if node.op == "get_attr"
            and not isinstance(self.tensor(node), nn.Parameter)
            and node not in self.changed
        )
        before = -1
        while len(constant) != before:
            before = len(constant)
            for node in self.operations:
                # A value that other operations write into is constant only if they are.
                needed = [*node.all_input_nodes, *self.colocated[node]]
                if node in constant and not all(source in constant for source in needed):
                    constant.remove(node)
        self.constant = frozenset(constant)

    def tensor(self, node: fx.Node) -> Any:
        """Return the parameter, buffer, constant or subgraph that a get_attr node stands for."""
        return attribute(node)

    @cached_property
    def stage_operations(self) -> list[fx.Node]:
        """Operations that belong to a single stage: all but constants."""
        return [node for node in self.operations if node not in self.constant]

    @cached_property
    def inseparable(self) -> frozenset[int]:
        """Positions in `stage_operations` at which no stage may begin."""
        return inseparable(self.stage_operations, self.root, self.outputs)

    @cached_property
    def _differentiable(self) -> frozenset[fx.Node]:
        """Nodes on a gradient's path, including views of memory that such a node is written to."""
        found: set[fx.Node] = set()
        written: set[fx.Node] = set()
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                tensor = self.tensor(node)
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    found.add(node)
                continue
            reached = any(
                source in found or self.root[source] in written for source in node.all_input_nodes
            )
            if node.op == "call_function" and reached and not _cuts_gradients(node):
                found.update([node] if _floats(node) else [])
                written.update(
                    self.root[value] for value in changed_by(node) if value.op != "get_attr"
                )
        # A view that was made before the write shows the written value.
        found |= {node for node in self.operations if self.root[node] in written and _floats(node)}
        return frozenset(found & self._wanted(found, self.outputs))

    def _wanted(self, found: Set[fx.Node], ends: Iterable[Any]) -> set[fx.Node]:
        """Return the nodes of `found` from which a gradient's path leads to the `ends`."""
        # Walk backwards from the ends: an operation is wanted if its result is wanted, or if it
        # writes into memory of which a wanted value is a view.
        wanted = {leaf for leaf in ends if leaf in found}
        families = {self.root[node] for node in wanted}
        for node in reversed(self.operations):
            writes = any(self.root[value] in families for value in changed_by(node))
            leads = node in wanted or self.root[node] in families or writes
            if not leads or _cuts_gradients(node):
                continue
            sources = [source for source in node.all_input_nodes if source in found]
            if node in found:
                wanted.update([node, *sources])
            roots = (self.root[source] for source in sources)
            families.update(root for root in roots if root in self.changed)
        return wanted

    @property
    def learned(self) -> frozenset[str]:
        """Names of the parameters that a gradient reaches."""
        return frozenset(self.names[node] for node in self._differentiable if node in self.names)

    def learned_from(self, ends: Iterable[fx.Node]) -> frozenset[str]:
        """Return the names of the parameters that a gradient from any of the `ends` reaches."""
        wanted = self._wanted(self._differentiable, ends)
        return frozenset(self.names[node] for node in wanted if node in self.names)

    def value(self, node: fx.Node) -> ValueSpec:
        """Return the value of a node with a single tensor."""
        return ValueSpec.of(node.meta["val"], node in self._differentiable)

    def attributes(self, node: fx.Node) -> list[fx.Node]:
        """Return the get_attr nodes that an operation reads, directly or through constants."""
        return [source for source in self.ancestors([node]) if source.op == "get_attr"]

    def ancestors(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the inputs of these operations, and recursively those of constant inputs."""
        seen: dict[fx.Node, None] = {}
        # An explicit stack: chains of operations exceed Python's recursion limit.
        stack: list[fx.Node] = []
        for node in nodes:
            stack += node.all_input_nodes
        while stack:
            source = stack.pop()
            if source not in seen:
                seen[source] = None
                if source in self.constant and source.op == "call_function":
                    stack += [*source.all_input_nodes, *self.colocated[source]]
        return list(seen)

    def is_on_shards(self, node: fx.Node) -> bool:
        """Return whether the ranks of a tensor group draw different numbers in this module."""
        return any(path in self._on_shards for path in _modules_around(node))

    def numbers_of_draws(self) -> dict[fx.Node, int]:
        """Return the number of each random operation, counted through the model."""
        return {node: number for number, node in enumerate(filter(draws, self.operations))}


def leaves_of(inputs: Any) -> list[Any]:
    """Return the tensors of a model's inputs, in the order of a trace."""
    # Flattening a single tensor would take longer than many operations.
    return [inputs] if isinstance(inputs, Tensor) else list(tree_flatten(((inputs,), {}))[0])


def traced(
    model: nn.Module, inputs: Any, untraced: LeafModules
) -> tuple[fx.GraphModule, OpaqueFunctions, list[OpaqueBlock]]:
    """Return the graph, the layers behind its opaque operations, and its untraced modules.

    A module that prevents tracing becomes a single operation.
    """
    while True:
        try:
            return exported(model, inputs, untraced)
        except UntraceableError as caught:
            error = caught
        # Outside the except block, so that an error of the model is not chained to this error.
        if not _widened(untraced, model, inputs, error):
            raise error


def _widened(untraced: LeafModules, model: nn.Module, inputs: Any, error: UntraceableError) -> bool:
    """Return whether another module was made a single operation, found by running the model."""
    try:
        with without_cache(model):
            return untraced.widen(model, inputs, error)
    except ValueError:
        raise
    except Exception as failed:
        place = place_of(failed, model)
        said = str(failed).strip().split("\n")[0]
        raise ValueError(
            f"a {type(model).__name__} fails{f' in {place}' if place else ''}: "
            f"{type(failed).__name__}: {said}"
        ) from failed


def exported(
    model: nn.Module, inputs: Any, untraced: LeafModules, places: bool = False
) -> tuple[fx.GraphModule, OpaqueFunctions, list[OpaqueBlock]]:
    """Return the result of `traced` with the present set of untraced modules.

    places: whether each operation has a "stack_trace", the lines from which it was called. Raises
    UntraceableError.
    """
    # torch.export runs the model, which may draw; restore the generators afterwards.
    before = generators_state()
    kind = type(model).__name__
    try:
        with warnings.catch_warnings(), _settings(places):
            warnings.simplefilter("ignore")
            with (
                without_cache(model),
                opaque_layers(model) as layers,
                untraced.hidden(model, inputs) as blocks,
                record_side_effects(model, inputs) as lost,
            ):
                module = torch.export.export(model, (inputs,), strict=False).module()
    # These errors have a complete message, and callers distinguish them from the rest.
    except (LengthError, UntraceableError):
        raise
    except Exception as error:
        why, of_data = _why(error, model)
        raise UntraceableError(kind, why, modules_of(error, model), of_data) from error
    finally:
        restore_generators(before)
    if lost:
        raise UntraceableError(kind, lost[0].said, lost[0].modules, of_data=False)
    for node in list(module.graph.nodes):
        # The only called module checks the shapes of inputs; each shape has a separate trace.
        if node.op == "call_module":
            module.graph.erase_node(node)
    if not places:
        _check_numbers(module, model, inputs, untraced)
    return module, layers, blocks


def _check_numbers(
    module: fx.GraphModule, model: nn.Module, inputs: Any, untraced: LeafModules
) -> None:
    """Raise UntraceableError if an operation returns a number that depends on the data.

    Such a number is a symbol in the trace and would have to travel as a symbol.
    """
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if not all(_is_plain(leaf) for leaf in tree_leaves(node.meta.get("val"))):
            raise UntraceableError(
                type(model).__name__,
                f"{node.name} in {_place_of(node, model, inputs, untraced)} computes a number "
                "that depends on the data; make it independent of them, such as by a mask "
                "instead of indices",
                ["", *_modules_around(node)],
                of_data=True,
            )


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, PLAIN)


def _place_of(node: fx.Node, model: nn.Module, inputs: Any, untraced: LeafModules) -> str:
    """Return the position in the model's code at which an operation was called."""
    module, _, _ = exported(model, inputs, untraced, places=True)
    twins = [other for other in module.graph.nodes if other.name == node.name]
    stack = twins[0].meta.get("stack_trace") if twins else None
    return place_in(stack or "", owner_of(node))


def _why(error: Exception, model: nn.Module) -> tuple[str, bool]:
    """Return why and where torch.export cannot trace the model, as the end of a sentence.

    The second result is whether control flow on numbers in tensors is the reason.
    """
    # Imported here, because these imports take long.
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    # torch's errors for code that reads a number in a tensor
    of_data = (GuardOnDataDependentSymNode, DataDependentOutputException)
    place = place_of(error, model)
    at = f" in {place}" if place else ""
    if isinstance(error, of_data) or isinstance(error.__cause__, of_data):
        # torch's message has symbols of its graph, which mean nothing to users
        return (
            f"what it does{at} depends on numbers in tensors, drawn or computed, which are not in "
            "a trace; make its control flow independent of the data, such as by torch.where"
        ), True
    reason = first_line(error)
    return (
        f"torch.export cannot trace it{at} ({type(error).__name__}: {reason}); make its control "
        "flow independent of the data"
    ), False


@contextmanager
def _settings(places: bool) -> Iterator[None]:
    """Context manager: settings of torch for tracing; the previous settings are restored."""
    _trace = importlib.import_module(TRACES)

    # Settings of the whole process: they are restored in any case.
    fast = torch.backends.mha.get_fastpath_enabled()
    without_stacks = fx.config.do_not_emit_stack_traces
    # The fast path of a transformer's layer is a single operation that cannot be cut.
    torch.backends.mha.set_fastpath_enabled(False)
    # Stack traces of operations take long to collect, and are seldom needed.
    fx.config.do_not_emit_stack_traces = not places
    # On failure torch prints its graph and warns; `_why` gives a message of a single line instead.
    _trace.print = _silent  # type: ignore[attr-defined]
    level = _SYMBOLS.level
    _SYMBOLS.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _SYMBOLS.setLevel(level)
        del _trace.print
        torch.backends.mha.set_fastpath_enabled(fast)
        fx.config.do_not_emit_stack_traces = without_stacks


def _silent(*_: Any, **__: Any) -> None:
    """Print nothing."""


def names_of(
    model: nn.Module, module: fx.GraphModule, nodes: Iterable[fx.Node]
) -> Mapping[fx.Node, str]:
    """Return the names of parameters and buffers in the model; the first of several names."""
    known = {
        id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    several: Any = {"remove_duplicate": False}
    targets = {**dict(model.named_parameters(**several)), **dict(model.named_buffers(**several))}
    names: dict[fx.Node, str] = {}
    for node in nodes:
        if node.op == "get_attr" and str(node.target) in targets:
            # A tied parameter has several names in a graph; use the model's first name.
            names[node] = known.get(id(targets[str(node.target)]), str(node.target))
    return names


def draws(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers, by its arguments if they decide.

    Dropout that is off, or has probability zero, draws nothing, although its schema allows drawing.
    """
    if node.op != "call_function":
        return False
    if is_untraced(node):
        return draws_of(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        # an operation with a graph inside draws if an operation in the graph does
        inside = subgraph_of(node)
        return inside is not None and any(map(draws, inside[0].nodes))
    schema = node.target._schema
    given = dict(node.kwargs)
    given.update(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    for argument in schema.arguments:
        given.setdefault(argument.name, argument.default_value)
    # attention's dropout_p is 0 if dropout is off; other dropouts have a flag "train" as well
    for chance in ("dropout_p", "p", "dropout"):
        if chance in given and ("train" in given or chance == "dropout_p"):
            return bool(given[chance]) and bool(given.get("train", True))
    return torch.Tag.nondeterministic_seeded in node.target.tags


def owner_of(node: fx.Node) -> str:
    """Return the name of the module in which an operation was called, "" for the model itself."""
    around = _modules_around(node)
    return around[-1] if around else ""


def _modules_around(node: fx.Node) -> list[str]:
    """Return the names of the modules in which an operation was called, the innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()]


def is_unpacking(node: fx.Node) -> bool:
    """Return whether an operation selects a value from an operation with several results."""
    return node.target is operator.getitem


def origin_of(node: fx.Node) -> fx.Node:
    """Return the operation, or for a selected result the operation that made that result."""
    source = node.args[0] if is_unpacking(node) else node
    return origin_of(source) if isinstance(source, fx.Node) and source is not node else node


def _cuts_gradients(node: fx.Node) -> bool:
    """Return whether an operation stops gradients: detach, or a no_grad region."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[0] is False
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def _floats(node: fx.Node) -> bool:
    return any(
        isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        for leaf in tree_leaves(node.meta.get("val"))
    )
