"""Which operations of a trace change memory, and which of its values share it.

A value that travels is copied. A change of one copy would not be seen in the others, so that a cut
would change what the model computes. Therefore a trace is rewritten (`settle`):

    h.relu_()           gives h itself: what uses the result uses h
    inputs.add_(1)      inputs that change are copied first, as every stage reads its own
    self.count += 1     buffers are written where they are computed, not at the end, where
                        `torch.export` writes them

and places are found between which the model is not cut (`inseparable`): where two names of the same
memory would travel though one of them is still to be changed, such as in x[:, 0] = y, and where a
buffer that changes is used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from dure.parallel.pipeline.untraced import changed_of, is_untraced, shared_of

aten = torch.ops.aten

NORMS = (aten.batch_norm.default, aten.instance_norm.default)
DROPOUTS = (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default)
"""They give back the very tensor that they get where they do nothing."""


def attribute(node: fx.Node) -> Any:
    """The parameter, buffer, constant or part of the graph that a get_attr node stands for."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def part_of(node: fx.Node) -> tuple[fx.Graph, Sequence[Any]] | None:
    """The graph inside an operation, such as a region without gradients, and what it is given."""
    # Such an operation is given the graph as an argument, and after it the values for the graph's
    # inputs.
    for place, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            part = attribute(argument)
            if isinstance(part, fx.GraphModule):
                return part.graph, node.args[place + 1 :]
    return None


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation changes."""
    if node.op != "call_function":
        return []
    if is_untraced(node):
        return changed_of(node)
    if node.target in NORMS:
        # Running statistics, arguments 3 and 4, which change in training; schemas do not say so.
        return [buffer for buffer in node.args[3:5] if isinstance(buffer, fx.Node) and node.args[5]]
    if isinstance(node.target, torch._ops.OpOverload):
        # a quick no for nearly all operations
        if not node.target._schema.is_mutable:
            return []
        return [value for value, info in _arguments(node) if info is not None and info.is_write]
    inside = part_of(node)
    if inside is None:
        return []
    graph, given = inside
    root = families(graph)
    changed: set[fx.Node] = set()
    for operation in graph.nodes:
        changed.update(root[value] for value in changed_by(operation))
    own = [placeholder for placeholder in graph.nodes if placeholder.op == "placeholder"]
    return [v for v, p in zip(given, own, strict=False) if isinstance(v, fx.Node) and p in changed]


def _arguments(node: fx.Node) -> Iterable[tuple[fx.Node, Any]]:
    """The values that an operation is given, with what its schema says of their memory."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(value, fx.Node):
                yield value, argument.alias_info


def families(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each value the one whose memory it may share: itself, or what it is a view of."""
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        shared: list[fx.Node] = []
        if node.op == "call_function":
            if is_untraced(node):
                shared = shared_of(node)
            # Their schemas do not say that the result may be the argument itself.
            elif node.target in DROPOUTS:
                shared = node.all_input_nodes[:1]
            elif isinstance(node.target, torch._ops.OpOverload):
                shared = [value for value, info in _arguments(node) if info is not None]
            elif node.target is operator.getitem:
                shared = node.all_input_nodes[:1]
            else:
                # An operation with a graph inside may give back what it changes.
                shared = changed_by(node)
        root[node] = root[shared[0]] if shared else node
    return root


def settle(module: fx.GraphModule) -> None:
    """Rewrites a trace so that what changes memory can be cut."""
    graph = module.graph
    root = families(graph)
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        changed.update(root[value] for value in changed_by(node))
    # Three passes: inputs that change are copied; names of one memory become one; buffers are
    # written early.
    for node in list(graph.nodes):
        if node.op == "placeholder" and node in changed:
            with graph.inserting_after(node):
                copy = graph.call_function(aten.clone.default, (node,))
            # Later passes read shapes from `meta`.
            copy.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(
                copy, delete_user_cb=lambda user, copy=copy: user is not copy
            )
    for node in list(graph.nodes):
        if _gives_what_it_changes(node):
            node.replace_all_uses_with(changed_by(node)[0])
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "get_attr":
            # After the second pass it copies a buffer into itself: the buffer was changed in place.
            if node.args[0] is node.args[1]:
                graph.erase_node(node)
            else:
                _write_earlier(graph, node)


def _gives_what_it_changes(node: fx.Node) -> bool:
    """Whether an operation's result is, in shape too, the one argument that it changes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in NORMS:
        return False
    # such as transpose_, whose result has another shape than what was there
    if torch.Tag.inplace_view in node.target.tags:
        return False
    changed = changed_by(node)
    return len(changed) == 1 and isinstance(node.meta.get("val"), Tensor)


def _write_earlier(graph: fx.Graph, copy: fx.Node) -> None:
    """Writes a buffer as soon as it can be: its new value is complete, its old one is not needed.

    `copy` writes the value into the buffer at the end of the graph. It is moved to right after the
    last operation that reads the old value, or makes or changes the new one.
    """
    root = families(graph)
    buffer, value = copy.args[:2]
    source = root[value] if isinstance(value, fx.Node) else None
    # the last operation so far that must come before the write
    latest = None
    for node in graph.nodes:
        if node is copy:
            break
        reads = any(root[source] is buffer for source in node.all_input_nodes)
        makes = node is value or any(root[changed] is source for changed in changed_by(node))
        if node.op == "call_function" and (reads or makes):
            latest = node
    if latest is not None:
        latest.append(copy)


def mapped_regions(operations: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """What `torch.vmap` has computed, from where a dimension is hidden to where all are back."""
    regions: list[list[fx.Node]] = []
    # vmaps may be nested: a region ends when the outermost one does
    depth = 0
    for node in operations:
        name = getattr(node.target, "__name__", "")
        if name == "_vmap_increment_nesting":
            if depth == 0:
                regions.append([])
            depth += 1
        if depth > 0:
            regions[-1].append(node)
        if name == "_vmap_decrement_nesting":
            depth -= 1
    return regions


def company(
    operations: Sequence[fx.Node], root: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """For each operation those that have to be computed wherever it is.

    They are those that write into its memory, and those that `torch.vmap` has computed with it.
    """
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in operations:
        for value in changed_by(node):
            writers.setdefault(root[value], []).append(node)
    found = {node: list(writers.get(root[node], [])) for node in operations}
    for region in mapped_regions(operations):
        for node in region:
            # Inside a region values have a hidden dimension, and mean nothing apart.
            found[node] += region
    return found


def inseparable(
    moving: Sequence[fx.Node], root: Mapping[fx.Node, fx.Node], outputs: Sequence[Any]
) -> frozenset[int]:
    """The places in `moving` at which no stage may begin."""
    made = {node: place for place, node in enumerate(moving)}
    last: dict[fx.Node, int] = {}
    changes: dict[fx.Node, list[int]] = {}
    uses: dict[fx.Node, list[int]] = {}
    for place, node in enumerate(moving):
        for source in node.all_input_nodes:
            last[source] = place
            uses.setdefault(root[source], []).append(place)
        for value in changed_by(node):
            changes.setdefault(root[value], []).append(place)
    # The model's outputs are used after everything.
    last |= {leaf: len(moving) for leaf in outputs if isinstance(leaf, fx.Node)}
    # What takes a result apart stays with the operation that made it.
    found = {place for place, node in enumerate(moving) if node.target is operator.getitem}
    for region in mapped_regions(moving):
        found.update(range(made[region[0]] + 1, made[region[-1]] + 1))
    for family, places in changes.items():
        # A buffer that changes is used by one stage alone.
        if family.op == "get_attr" and not isinstance(attribute(family), nn.Parameter):
            found.update(range(uses[family][0] + 1, uses[family][-1] + 1))
            continue
        # Up to its last change no two names of the same memory may travel, each as a copy.
        lives = [(made[node], last.get(node, 0)) for node in moving if root[node] is family]
        if len(lives) > 1:
            for place in range(min(lives)[0] + 1, places[-1] + 1):
                # more than one name of this memory would cross here
                if sum(born < place <= end for born, end in lives) > 1:
                    found.add(place)
    return frozenset(found)
