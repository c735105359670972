"""Operations of a trace that change memory, and values that share memory.

A value that travels is copied. The other copies would not see a change of one copy, so a cut would
change the result of the model. Therefore a trace is rewritten (`rewrite_mutations`):

    h.relu_()           returns h itself: users of the result use h
    inputs.add_(1)      inputs that change are copied first, because every stage reads them itself
    self.count += 1     buffers are written when they are computed, not at the end, where
                        `torch.export` writes them

and positions at which the model must not be cut are found (`inseparable`): positions at which two
names of the same memory would travel before a change of that memory, for example in x[:, 0] = y,
and positions between uses of a buffer that changes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from dure.parallel.pipeline.opaque_modules import changed_of, is_untraced, shared_of

aten = torch.ops.aten

NORMS = (aten.batch_norm.default, aten.instance_norm.default)
DROPOUTS = (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default)
"""Operations that return their input tensor itself if they do nothing."""


def attribute(node: fx.Node) -> Any:
    """Return the parameter, buffer, constant or subgraph that a get_attr node stands for."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def subgraph_of(node: fx.Node) -> tuple[fx.Graph, Sequence[Any]] | None:
    """Return the graph inside an operation, for example a no_grad region, and the graph's inputs.

    None for an operation without a graph.
    """
    # The arguments of such an operation contain the graph, followed by the values for the graph's
    # inputs.
    for place, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            part = attribute(argument)
            if isinstance(part, fx.GraphModule):
                return part.graph, node.args[place + 1 :]
    return None


def changed_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation changes."""
    if node.op != "call_function":
        return []
    if is_untraced(node):
        return changed_of(node)
    if node.target in NORMS:
        # Running statistics, arguments 3 and 4, change in training; the schema does not declare it.
        return [buffer for buffer in node.args[3:5] if isinstance(buffer, fx.Node) and node.args[5]]
    if isinstance(node.target, torch._ops.OpOverload):
        # a quick no for nearly all operations
        if not node.target._schema.is_mutable:
            return []
        return [value for value, info in _arguments(node) if info is not None and info.is_write]
    inside = subgraph_of(node)
    if inside is None:
        return []
    graph, given = inside
    root = alias_roots(graph)
    changed: set[fx.Node] = set()
    for operation in graph.nodes:
        changed.update(root[value] for value in changed_by(operation))
    own = [placeholder for placeholder in graph.nodes if placeholder.op == "placeholder"]
    return [v for v, p in zip(given, own, strict=False) if isinstance(v, fx.Node) and p in changed]


def _arguments(node: fx.Node) -> Iterable[tuple[fx.Node, Any]]:
    """Return the values that an operation takes, each with the alias information of its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(value, fx.Node):
                yield value, argument.alias_info


def alias_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each value the value whose memory it may share: itself, or the base of a view."""
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        shared: list[fx.Node] = []
        if node.op == "call_function":
            if is_untraced(node):
                shared = shared_of(node)
            # Their schemas do not declare that the result may be the argument itself.
            elif node.target in DROPOUTS:
                shared = node.all_input_nodes[:1]
            elif isinstance(node.target, torch._ops.OpOverload):
                shared = [value for value, info in _arguments(node) if info is not None]
            elif node.target is operator.getitem:
                shared = node.all_input_nodes[:1]
            else:
                # An operation with a graph inside may return a value that it changes.
                shared = changed_by(node)
        root[node] = root[shared[0]] if shared else node
    return root


def rewrite_mutations(module: fx.GraphModule) -> None:
    """Rewrite a trace so that operations that change memory can be cut."""
    graph = module.graph
    root = alias_roots(graph)
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        changed.update(root[value] for value in changed_by(node))
    # Three passes: inputs that change are copied; several names of the same memory become a single
    # name; buffers are written early.
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
    """Return whether an operation's result is, also in shape, the only argument that it changes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in NORMS:
        return False
    # for example transpose_, whose result has another shape than the argument had
    if torch.Tag.inplace_view in node.target.tags:
        return False
    changed = changed_by(node)
    return len(changed) == 1 and isinstance(node.meta.get("val"), Tensor)


def _write_earlier(graph: fx.Graph, copy: fx.Node) -> None:
    """Move the write of a buffer to the first position at which it is safe.

    `copy` writes the value into the buffer at the end of the graph. It is moved to right after the
    last operation that reads the old value, or that makes or changes the new value.
    """
    root = alias_roots(graph)
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
    """Return the regions that `torch.vmap` computed: the operations with hidden dimensions."""
    regions: list[list[fx.Node]] = []
    # vmaps may be nested: a region ends with the outermost vmap
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


def colocated_operations(
    operations: Sequence[fx.Node], root: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Return for each operation the operations that the same stage must compute.

    They are the operations that write into its memory, and the operations of the same `torch.vmap`
    region.
    """
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in operations:
        for value in changed_by(node):
            writers.setdefault(root[value], []).append(node)
    found = {node: list(writers.get(root[node], [])) for node in operations}
    for region in mapped_regions(operations):
        for node in region:
            # Inside a region values have a hidden dimension and no meaning outside the region.
            found[node] += region
    return found


def inseparable(
    moving: Sequence[fx.Node], root: Mapping[fx.Node, fx.Node], outputs: Sequence[Any]
) -> frozenset[int]:
    """Return the positions in `moving` at which no stage may begin."""
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
    # An operation that unpacks a result stays with the operation that made the result.
    found = {place for place, node in enumerate(moving) if node.target is operator.getitem}
    for region in mapped_regions(moving):
        found.update(range(made[region[0]] + 1, made[region[-1]] + 1))
    for family, places in changes.items():
        # Only a single stage may use a buffer that changes.
        if family.op == "get_attr" and not isinstance(attribute(family), nn.Parameter):
            found.update(range(uses[family][0] + 1, uses[family][-1] + 1))
            continue
        # Before its last change, two names of the same memory must not travel, each as a copy.
        lives = [(made[node], last.get(node, 0)) for node in moving if root[node] is family]
        if len(lives) > 1:
            for place in range(min(lives)[0] + 1, places[-1] + 1):
                # more than one name of this memory would cross here
                if sum(born < place <= end for born, end in lives) > 1:
                    found.add(place)
    return frozenset(found)
