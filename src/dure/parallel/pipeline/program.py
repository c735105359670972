"""What one stage computes: its operations of a trace, as a module of its own.

    (received values, inputs) -> (leaving values)       the last stage gives the model's outputs

What travels from stage s to stage s+1 is what operations of stages 0 … s have made and operations
of stages s+1 … use. A value that skips stages is carried past them, and counts as traffic at every
boundary. Inputs do not travel: a stage that uses them reads them. Constants, such as masks, are
computed where they are used. A parameter that several stages use lies in each of them; its gradient
is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from dure.parallel.pipeline.apart import Later, apart, pays
from dure.parallel.pipeline.draws import Stream
from dure.parallel.pipeline.memory import changed_by
from dure.parallel.pipeline.trace import Trace, Value, origin_of
from dure.parallel.pipeline.untraced import in_place_of, is_untraced
from dure.parallel.tensor.opaque import behind, is_opaque
from dure.tensors.hooks import has_hooks


@dataclass
class Program:
    """One stage of a trace.

    module: called with the received values and the inputs, as one list of tensors; returns a tuple.
    inputs: which leaves of the model's inputs it reads. received, leaving: what travels; the last
        stage's leaving is empty.
    """

    module: nn.Module
    inputs: tuple[int, ...]
    received: tuple[Value, ...]
    leaving: tuple[Value, ...]
    written: tuple[str, ...] = ()
    """The buffers that it changes."""
    shapes: tuple[torch.Size | None, ...] = ()
    """Of the inputs that it reads, for which alone it holds; empty where it holds for any."""


def stages_of(trace: Trace, starts: Sequence[int]) -> dict[fx.Node, int]:
    """The stage of every operation that is not constant.

    starts: the places in `trace.moving` where stages 1 … begin; a stage begins a little later where
    what lies there has to stay together.
    """
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for place, node in enumerate(trace.moving):
        # Several stages may begin at one place if that could not be parted; those are then empty,
        # and refused (`CutModel.decide`).
        while stage < len(starts) and place >= starts[stage] and place not in trace.inseparable:
            stage += 1
        stage_of[node] = stage_of.get(origin_of(node), stage)
    return stage_of


def parameters_of(trace: Trace, stage_of: Mapping[fx.Node, int], stages: int) -> list[list[str]]:
    """The names of the parameters and buffers that each stage uses."""
    names: list[dict[str, None]] = [{} for _ in range(stages)]
    for node in trace.moving:
        for source in trace.attributes(node):
            if source in trace.names:
                names[stage_of[node]][trace.names[source]] = None
    for leaf in trace.outputs:
        # A model may give back a parameter as it is; the last stage then needs it.
        if isinstance(leaf, fx.Node) and leaf in trace.names:
            names[stages - 1][trace.names[leaf]] = None
    return [list(own) for own in names]


def check_buffers(trace: Trace, stage_of: Mapping[fx.Node, int]) -> None:
    """Raises ValueError if one stage changes a buffer or parameter that another one uses."""
    users: dict[str, set[int]] = {}
    changed: set[str] = set()
    for node in trace.moving:
        roots = [trace.root[value] for value in node.all_input_nodes]
        for source in [*trace.attributes(node), *roots]:
            if source in trace.names:
                users.setdefault(trace.names[source], set()).add(stage_of[node])
                if source in trace.changed:
                    changed.add(trace.names[source])
    for name in sorted(changed):
        if len(users[name]) > 1:
            stages = " and ".join(map(str, sorted(users[name])))
            raise ValueError(
                f"{name} changes in a forward pass, and stages {stages} use it: cut the model "
                f"elsewhere"
            )


def crossing(trace: Trace, stage_of: Mapping[fx.Node, int], stages: int) -> list[list[fx.Node]]:
    """The values that travel over each boundary, from stage s to s+1, in the order of making."""
    last_use: dict[fx.Node, int] = {}
    for node in trace.moving:
        for source in _moving_sources(trace, node):
            last_use[source] = max(last_use.get(source, 0), stage_of[node])
    for leaf in trace.outputs:
        if isinstance(leaf, fx.Node) and leaf in stage_of:
            # The last stage gives the model's outputs, wherever they were made.
            last_use[leaf] = stages - 1
    crossed: list[list[fx.Node]] = [[] for _ in range(stages - 1)]
    for node in trace.moving:
        # over every boundary from where it is made to where it is used last
        for boundary in range(stage_of[node], last_use.get(node, 0)):
            crossed[boundary].append(node)
    return crossed


def _moving_sources(trace: Trace, node: fx.Node) -> Iterable[fx.Node]:
    return (s for s in node.all_input_nodes if s.op == "call_function" and s not in trace.constant)


def program(
    trace: Trace,
    stage_of: Mapping[fx.Node, int],
    stages: int,
    stage: int,
    stream: Stream,
    later: Later | None = None,
) -> Program:
    """The program of `stage`.

    later: what is done with weight gradients; None where autograd is left to it, or nothing goes
        backward.
    """
    over = crossing(trace, stage_of, stages)
    received = over[stage - 1] if stage > 0 else []
    leaving = over[stage] if stage < stages - 1 else []
    own = [node for node in trace.moving if stage_of[node] == stage]
    last = stage == stages - 1
    outputs = [leaf for leaf in trace.outputs if isinstance(leaf, fx.Node)]
    return _Builder(trace, stream, later).build(
        own=own,
        received=received,
        leaving=leaving,
        results=outputs if last else leaving,
        last=last,
    )


def _shape(placeholder: fx.Node) -> torch.Size | None:
    """Of an input; None of one that is no tensor."""
    value = placeholder.meta["val"]
    return value.shape if isinstance(value, torch.Tensor) else None


class _Builder:
    """Copies operations of a trace into a graph of their own."""

    def __init__(self, trace: Trace, stream: Stream, later: Later | None) -> None:
        self.trace = trace
        self.stream = stream
        self.later = later
        self.graph = fx.Graph()
        # each node of the trace that is needed, and its copy in this graph
        self.copies: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, Any] = {}
        self.numbers = trace.numbers_of_draws()

    def build(
        self,
        own: Sequence[fx.Node],
        received: Sequence[fx.Node],
        leaving: Sequence[fx.Node],
        results: Sequence[fx.Node],
        last: bool,
    ) -> Program:
        """The program of these operations.

        own: the stage's operations. results: what it gives on; in the last stage these are the
        model's outputs.
        """
        trace = self.trace
        graph = self.graph
        # What is given on may be constant: then it is computed here, with its company.
        ends = [node for node in results if node in trace.constant]
        for node in list(ends):
            ends += trace.company.get(node, [])
        needed = {*trace.ancestors([*own, *ends]), *ends, *results}
        # only the inputs that this stage reads; a rank may read none
        inputs = [index for index, node in enumerate(trace.placeholders) if node in needed]
        # What is changed in place. Buffers and parameters have names; any other value may share its
        # memory with what was received.
        changed: set[fx.Node] = set()
        for node in own:
            changed.update(trace.root[value] for value in changed_by(node))
        changes = any(value not in trace.names for value in changed)
        for node in [*received, *(trace.placeholders[index] for index in inputs)]:
            self.copies[node] = graph.placeholder(node.name)
        if changes:
            # What was received is kept for backward as it came, so copies are changed.
            for node in received:
                self.copies[node] = graph.call_function(torch.clone, (self.copies[node],))
        for node in trace.module.graph.nodes:
            if node.op == "get_attr" and node in needed:
                self._attribute(node)
        own_set = set(own)
        # In the order of the trace: an operation may change memory that a later one reads.
        for node in trace.operations:
            if node in own_set or (node in trace.constant and node in needed):
                self._operation(node)
        given: Sequence[Any] = trace.outputs if last else results
        graph.output(
            tuple(self.copies[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in given)
        )
        # The parameters themselves, not copies: gradients arrive in the model's.
        module = fx.GraphModule(self.attributes, graph)
        own_names = [value for value in changed if value in trace.names]
        return Program(
            module=module,
            inputs=tuple(inputs),
            received=tuple(trace.value(node) for node in received),
            leaving=tuple(trace.value(node) for node in leaving),
            written=tuple(
                trace.names[v] for v in own_names if not isinstance(trace.tensor(v), nn.Parameter)
            ),
            shapes=tuple(_shape(trace.placeholders[index]) for index in inputs),
        )

    def _attribute(self, node: fx.Node) -> None:
        # by the model's name, so that tied parameters are one attribute
        target = self.trace.names.get(node, str(node.target))
        self.attributes[target] = self.trace.tensor(node)
        self.copies[node] = self.graph.create_node("get_attr", target, name=node.name)

    def _operation(self, node: fx.Node) -> None:
        copy = self.graph.node_copy(node, lambda source: self.copies[source])
        self.copies[node] = copy
        # the divided layer itself, in the place of the operation that stood for it
        if is_opaque(node):
            copy.target = behind(node, self.trace.layers)
            return
        if is_untraced(node):
            copy.target = in_place_of(node, self.trace.blocks)
        if node in self.numbers:
            on_shards = self.trace.is_on_shards(node)
            copy.target = self.stream.drawing(copy.target, self.numbers[node], on_shards)  # type: ignore[arg-type]
        elif self.later is not None:
            copy.target = self._apart(node, copy.target, self.later)

    def _apart(self, node: fx.Node, target: Any, later: Later) -> Any:
        """The same operation, its weight's gradient apart where that is a parameter and it pays."""
        place, deferred = apart(target, later)
        # An operation whose weight is not where it is expected stays as it is.
        if deferred is None or place >= len(node.args) or node.kwargs:
            return target
        weight = node.args[place]
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            tensor = self.trace.tensor(weight)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and not has_hooks(tensor):
                return deferred if pays(target, tensor, later) else target
        return target
