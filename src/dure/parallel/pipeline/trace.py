"""What a model computes, as a list of operations: the form in which any model can be cut.

`torch.export` runs the model once on tensors without data and writes down every operation, with the
parameters, the buffers and the earlier values that it uses. Control flow that depends on shapes,
tuples, dicts, attention masks, skip connections and shared weights are all resolved by that: what
is left are operations in an order in which values flow forward only. So any position in the list is
a place where the model can be cut.

Operations that change memory are settled first (`dure.parallel.pipeline.memory`).

A module that cannot be traced is one operation (`dure.parallel.pipeline.whole`).

A trace holds for the shapes and the mode (training or evaluation) in which it was made. What a
model does apart from its operations is not in it; where that can be seen
(`dure.parallel.pipeline.unseen`) the module is one operation, or the model refused.

    random     operations that draw: dropout, attention and recurrent layers with dropout, …
    constant   operations without parameters and inputs in their ancestry, such as positions and
               masks: every stage that needs one computes it anew, so that it does not travel
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
from dure.parallel.pipeline.memory import (
    attribute,
    changed_by,
    company,
    families,
    inseparable,
    part_of,
    settle,
)
from dure.parallel.pipeline.place import modules_of, place_in, place_of
from dure.parallel.pipeline.unseen import unseen
from dure.parallel.pipeline.untraced import Block, UntraceableError, draws_of, is_untraced
from dure.parallel.pipeline.whole import Untraced
from dure.parallel.pipeline.without_cache import without_cache
from dure.parallel.tensor.draws import modules_on_shards
from dure.parallel.tensor.functions import LengthError
from dure.parallel.tensor.opaque import Layers, hidden
from dure.randomness.seeds import generators_state, restore_generators

TRACES = "torch.export._trace"
"""The module that traces. It takes seconds to import."""

_SYMBOLS = logging.getLogger("torch.fx.experimental.symbolic_shapes")

PLAIN = (Tensor, int, float, bool, type(None))
"""What an operation may give."""


@dataclass(frozen=True)
class Value:
    """A tensor without its data. differentiable: whether a gradient may come back for it.

    order: its dimensions as they lie in memory in this trace, the last the closest. A view of a
    permuted tensor is possible only where memory is in that order, so the receiver lays out anew
    what came as it is indexed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, differentiable: bool) -> Value:
        """That of a tensor, which may be without data."""
        return cls(tuple(tensor.shape), tensor.dtype, differentiable, _order(tensor))

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def empty(self, device: torch.device) -> Tensor:
        """Room for it, as it travels."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same value, in the order of memory."""
        inverse = [self.order.index(dimension) for dimension in range(len(self.order))]
        return tensor.permute(self.order).contiguous().permute(inverse)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as they lie in memory; as they are indexed, where it has gaps."""
    strides: tuple[int, ...] = tensor.stride()
    # largest stride first; of equal ones the first dimension
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    expected = 1
    for dimension in reversed(order):
        if tensor.shape[dimension] != 1:
            if strides[dimension] != expected:
                # It has gaps or overlaps: no order of dimensions describes it.
                return tuple(range(tensor.dim()))
            expected *= tensor.shape[dimension]
    return tuple(order)


class Trace:
    """The operations of `model` for inputs like `inputs`, in the mode in which it is.

    untraced: the modules that are one operation; more are added where the model cannot be traced
    without. Raises ValueError if it cannot be traced.
    """

    def __init__(self, model: nn.Module, inputs: Any, untraced: Untraced | None = None) -> None:
        self.module, self.layers, self.blocks = traced(model, inputs, untraced or Untraced())
        # First, for it rewrites the graph that all of the following look at.
        settle(self.module)
        self._on_shards = modules_on_shards(model)
        nodes = list(self.module.graph.nodes)
        self.root = families(self.module.graph)
        self.changed: set[fx.Node] = set()
        for node in nodes:
            # Memory that some operation changes, by the value that it belongs to.
            self.changed.update(self.root[value] for value in changed_by(node))
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.operations = [node for node in nodes if node.op == "call_function"]
        # torch.export keeps how the outputs' leaves make up the outputs
        self.structure: TreeSpec = self.module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
        self.outputs: list[Any] = list(self.module.graph.output_node().args[0])  # type: ignore[arg-type]
        self.names = names_of(model, self.module, nodes)
        self.company = company(self.operations, self.root)
        self._find_constants()

    def _find_constants(self) -> None:
        """Which values depend on nothing but constants."""
        # All are taken for constant at first; those that need something else are taken out until
        # nothing changes, for an operation's company may come after it.
        constant = {node for node in self.operations if not (draws(node) or is_untraced(node))}
        # Of what the model holds: all but parameters, which are learned, and memory that changes.
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
                # A value that others write into is constant only if they are.
                needed = [*node.all_input_nodes, *self.company[node]]
                if node in constant and not all(source in constant for source in needed):
                    constant.remove(node)
        self.constant = frozenset(constant)

    def tensor(self, node: fx.Node) -> Any:
        """The parameter, buffer, constant or part of the graph that a get_attr node stands for."""
        return attribute(node)

    @cached_property
    def moving(self) -> list[fx.Node]:
        """The operations that belong to one place: all but constants."""
        return [node for node in self.operations if node not in self.constant]

    @cached_property
    def inseparable(self) -> frozenset[int]:
        """The places in `moving` at which no stage may begin."""
        return inseparable(self.moving, self.root, self.outputs)

    @cached_property
    def _differentiable(self) -> frozenset[fx.Node]:
        """What a gradient goes through, with what shares memory into which such a value goes."""
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
        # A view that was made before the write shows what was written.
        found |= {node for node in self.operations if self.root[node] in written and _floats(node)}
        return frozenset(found & self._wanted(found, self.outputs))

    def _wanted(self, found: Set[fx.Node], ends: Iterable[Any]) -> set[fx.Node]:
        """Of these values those from which a gradient's path leads to the `ends`."""
        # Backwards from the ends: an operation is wanted if its result is, or if it writes into
        # memory of which a wanted value is a view.
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
        """The names of the parameters to which a gradient's path leads."""
        return frozenset(self.names[node] for node in self._differentiable if node in self.names)

    def learned_from(self, ends: Iterable[fx.Node]) -> frozenset[str]:
        """The names of the parameters from which a gradient's path leads to one of the `ends`."""
        wanted = self._wanted(self._differentiable, ends)
        return frozenset(self.names[node] for node in wanted if node in self.names)

    def value(self, node: fx.Node) -> Value:
        """What a node that gives one tensor gives."""
        return Value.of(node.meta["val"], node in self._differentiable)

    def attributes(self, node: fx.Node) -> list[fx.Node]:
        """The get_attr nodes that an operation reads, through constants too."""
        return [source for source in self.ancestors([node]) if source.op == "get_attr"]

    def ancestors(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """What these operations use, and what that uses, as far as it is constant."""
        seen: dict[fx.Node, None] = {}
        # A stack of our own: chains of operations are longer than Python recurses.
        stack: list[fx.Node] = []
        for node in nodes:
            stack += node.all_input_nodes
        while stack:
            source = stack.pop()
            if source not in seen:
                seen[source] = None
                if source in self.constant and source.op == "call_function":
                    stack += [*source.all_input_nodes, *self.company[source]]
        return list(seen)

    def is_on_shards(self, node: fx.Node) -> bool:
        """Whether in this operation's module every rank of a tensor group draws for itself."""
        return any(path in self._on_shards for path in _modules_around(node))

    def numbers_of_draws(self) -> dict[fx.Node, int]:
        """The random operations, numbered through the model."""
        return {node: number for number, node in enumerate(filter(draws, self.operations))}


def leaves_of(inputs: Any) -> list[Any]:
    """The tensors of a model's inputs, in the order of a trace."""
    # To take apart what has no parts takes longer than many an operation.
    return [inputs] if isinstance(inputs, Tensor) else list(tree_flatten(((inputs,), {}))[0])


def traced(
    model: nn.Module, inputs: Any, untraced: Untraced
) -> tuple[fx.GraphModule, Layers, list[Block]]:
    """The graph, what its opaque operations stand for, and what its untraced ones do.

    Where the model cannot be traced, the module that is the reason becomes one operation.
    """
    while True:
        try:
            return exported(model, inputs, untraced)
        except UntraceableError as caught:
            error = caught
        # Not while that is handled, for an error of the model's own would be said to come from it.
        if not _widened(untraced, model, inputs, error):
            raise error


def _widened(untraced: Untraced, model: nn.Module, inputs: Any, error: UntraceableError) -> bool:
    """Whether a module more is one operation, which is tried on the model as it runs."""
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
    model: nn.Module, inputs: Any, untraced: Untraced, places: bool = False
) -> tuple[fx.GraphModule, Layers, list[Block]]:
    """The same with the modules that are one operation so far.

    places: each operation has a "stack_trace", with the lines from which it was called. Raises
    UntraceableError.
    """
    # torch.export runs the model, which may draw; what comes after must not notice.
    before = generators_state()
    kind = type(model).__name__
    try:
        with warnings.catch_warnings(), _settings(places):
            warnings.simplefilter("ignore")
            with (
                without_cache(model),
                hidden(model) as layers,
                untraced.hidden(model, inputs) as blocks,
                unseen(model, inputs) as lost,
            ):
                module = torch.export.export(model, (inputs,), strict=False).module()
    # These say already what is wrong, and callers tell them from the rest.
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
        # The one module called checks the shapes of inputs; each shape has a trace of its own.
        if node.op == "call_module":
            module.graph.erase_node(node)
    if not places:
        _check_numbers(module, model, inputs, untraced)
    return module, layers, blocks


def _check_numbers(
    module: fx.GraphModule, model: nn.Module, inputs: Any, untraced: Untraced
) -> None:
    """A number that depends on the data is a symbol here, and would have to travel as one."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if not all(_is_plain(leaf) for leaf in tree_leaves(node.meta.get("val"))):
            raise UntraceableError(
                type(model).__name__,
                f"{node.name} in {_place_of(node, model, inputs, untraced)} makes a number that "
                "depends on the data; make it independent of them, such as by a mask instead of "
                "indices",
                ["", *_modules_around(node)],
                of_data=True,
            )


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, PLAIN)


def _place_of(node: fx.Node, model: nn.Module, inputs: Any, untraced: Untraced) -> str:
    """Where in the model an operation was called."""
    module, _, _ = exported(model, inputs, untraced, places=True)
    twins = [other for other in module.graph.nodes if other.name == node.name]
    stack = twins[0].meta.get("stack_trace") if twins else None
    return place_in(stack or "", owner_of(node))


def _why(error: Exception, model: nn.Module) -> tuple[str, bool]:
    """Why torch.export cannot trace the model, and where, as the end of a sentence.

    With it, whether that is numbers in tensors.
    """
    # Here, for they take long to import.
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    # what torch raises where a number in a tensor is asked for
    of_data = (GuardOnDataDependentSymNode, DataDependentOutputException)
    place = place_of(error, model)
    at = f" in {place}" if place else ""
    if isinstance(error, of_data) or isinstance(error.__cause__, of_data):
        # torch tells it by the symbols of its own graph, which say nothing to others
        return (
            f"what it does{at} depends on numbers in tensors, drawn or computed, which a trace "
            "does not have; make its control flow independent of the data, such as by torch.where"
        ), True
    reason = first_line(error)
    return (
        f"torch.export cannot trace it{at} ({type(error).__name__}: {reason}); make its control "
        "flow independent of the data"
    ), False


@contextmanager
def _settings(places: bool) -> Iterator[None]:
    """Those of torch while it traces, and then what they were."""
    _trace = importlib.import_module(TRACES)

    # Settings of the whole process: they are put back, whatever happens.
    fast = torch.backends.mha.get_fastpath_enabled()
    without_stacks = fx.config.do_not_emit_stack_traces
    # The fast path of a transformer's layer is one operation, in which one cannot cut.
    torch.backends.mha.set_fastpath_enabled(False)
    # Where in a file each operation is takes long to find out, and is seldom asked.
    fx.config.do_not_emit_stack_traces = not places
    # Where it fails torch prints its graph, and warns; what is wrong is said in a line (`_why`).
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
    """Prints nothing."""


def names_of(
    model: nn.Module, module: fx.GraphModule, nodes: Iterable[fx.Node]
) -> Mapping[fx.Node, str]:
    """The names of parameters and buffers in the model: the first, where one has several."""
    known = {
        id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    several: Any = {"remove_duplicate": False}
    targets = {**dict(model.named_parameters(**several)), **dict(model.named_buffers(**several))}
    names: dict[fx.Node, str] = {}
    for node in nodes:
        if node.op == "get_attr" and str(node.target) in targets:
            # A tied parameter has several names in a graph, and one here: the model's first.
            names[node] = known.get(id(targets[str(node.target)]), str(node.target))
    return names


def draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers, by its arguments where these decide.

    Dropout that is off, or has a chance of zero, draws nothing, though its schema says that it may.
    """
    if node.op != "call_function":
        return False
    if is_untraced(node):
        return draws_of(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        # an operation with a graph inside draws if something in it does
        inside = part_of(node)
        return inside is not None and any(map(draws, inside[0].nodes))
    schema = node.target._schema
    given = dict(node.kwargs)
    given.update(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    for argument in schema.arguments:
        given.setdefault(argument.name, argument.default_value)
    # attention's dropout_p is 0 where it is off; other dropouts have a flag "train" as well
    for chance in ("dropout_p", "p", "dropout"):
        if chance in given and ("train" in given or chance == "dropout_p"):
            return bool(given[chance]) and bool(given.get("train", True))
    return torch.Tag.nondeterministic_seeded in node.target.tags


def owner_of(node: fx.Node) -> str:
    """The name of the module in which an operation was called, "" for the model itself."""
    around = _modules_around(node)
    return around[-1] if around else ""


def _modules_around(node: fx.Node) -> list[str]:
    """The names of the modules in which an operation was called, the innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()]


def takes_apart(node: fx.Node) -> bool:
    """Whether it picks one value out of several that an operation gave."""
    return node.target is operator.getitem


def origin_of(node: fx.Node) -> fx.Node:
    """The operation itself, or that whose several values it takes apart: the two stay together."""
    source = node.args[0] if takes_apart(node) else node
    return origin_of(source) if isinstance(source, fx.Node) and source is not node else node


def _cuts_gradients(node: fx.Node) -> bool:
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[0] is False
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def _floats(node: fx.Node) -> bool:
    return any(
        isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        for leaf in tree_leaves(node.meta.get("val"))
    )
