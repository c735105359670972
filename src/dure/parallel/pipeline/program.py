"""Program of a single pipeline stage: the stage's operations of a trace, as a separate module.

    (received values, inputs) -> (leaving values)       the last stage returns the model's outputs

A value travels from stage s to stage s+1 if an operation of stage s or of an earlier stage makes
the value, and an operation of a later stage uses the value. A value that skips stages passes
through them, and counts as traffic at every boundary. Inputs do not travel: a stage that uses them
reads them. Constants, such as masks, are computed in each stage that uses them. A parameter that
several stages use is stored in each of them; its gradient is the sum of the stages' gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from dure.parallel.pipeline.aliasing import changed_by
from dure.parallel.pipeline.opaque_modules import block_function, is_untraced
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.split_backward import (
    GradientHandler,
    is_split_worthwhile,
    split_operation,
)
from dure.parallel.pipeline.trace import ModelTrace, ValueSpec, origin_of
from dure.parallel.tensor.opaque import function_behind, is_opaque
from dure.tensors.backward import has_hooks


@dataclass
class StageProgram:
    """A single stage of a trace.

    Args:
        module: module that is called with the received values, then the inputs, as tensors, and
            returns a tuple of the leaving values, or of the model's outputs.
        inputs: indices of the leaves of the model's inputs that the stage reads.
        received: the values from the stage before.
        leaving: the values for the stage after; empty in the last stage.
        written: names of the buffers that the stage changes.
        shapes: shapes of the inputs in the trace, None for an input that is no tensor. `Stage`
            rejects inputs of other shapes. Without shapes nothing is checked.
    """

    module: nn.Module
    inputs: tuple[int, ...]
    received: tuple[ValueSpec, ...]
    leaving: tuple[ValueSpec, ...]
    written: tuple[str, ...] = ()
    shapes: tuple[torch.Size | None, ...] = ()


def stages_of(trace: ModelTrace, starts: Sequence[int]) -> dict[fx.Node, int]:
    """Return the stage of every operation that is not constant.

    starts: the positions in `trace.stage_operations` at which stages 1, 2 and so on begin. If no
    stage may begin at a position (`ModelTrace.inseparable`), the stage begins at the next possible
    position.
    """
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for position, node in enumerate(trace.stage_operations):
        # Several stages may thus begin at the same position. All but the last of them are empty,
        # and `CutModel.decide` rejects empty stages.
        while (
            stage < len(starts) and position >= starts[stage] and position not in trace.inseparable
        ):
            stage += 1
        # A result that is selected from several results belongs to the stage of their operation.
        stage_of[node] = stage_of.get(origin_of(node), stage)
    return stage_of


def parameters_of(
    trace: ModelTrace, stage_of: Mapping[fx.Node, int], stages: int
) -> list[list[str]]:
    """Return the names of the parameters and buffers that each stage uses."""
    names: list[dict[str, None]] = [{} for _ in range(stages)]
    for node in trace.stage_operations:
        for source in trace.attributes(node):
            if source in trace.names:
                names[stage_of[node]][trace.names[source]] = None
    for leaf in trace.outputs:
        # A model may return a parameter unchanged; the last stage then needs it.
        if isinstance(leaf, fx.Node) and leaf in trace.names:
            names[stages - 1][trace.names[leaf]] = None
    return [list(own) for own in names]


def check_buffers(trace: ModelTrace, stage_of: Mapping[fx.Node, int]) -> None:
    """Raise ValueError if a stage changes a buffer or parameter that another stage uses."""
    users: dict[str, set[int]] = {}
    changed: set[str] = set()
    for node in trace.stage_operations:
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
                f"{name} changes in a forward pass, but stages {stages} use it: cut the model "
                "elsewhere"
            )


def crossing(
    trace: ModelTrace, stage_of: Mapping[fx.Node, int], stages: int
) -> list[list[fx.Node]]:
    """Return the values that travel from each stage s to s+1, in order of creation."""
    last_use: dict[fx.Node, int] = {}
    for node in trace.stage_operations:
        for source in _moving_sources(trace, node):
            last_use[source] = max(last_use.get(source, 0), stage_of[node])
    for leaf in trace.outputs:
        if isinstance(leaf, fx.Node) and leaf in stage_of:
            # The last stage returns the model's outputs, whichever stage made them.
            last_use[leaf] = stages - 1
    crossed: list[list[fx.Node]] = [[] for _ in range(stages - 1)]
    for node in trace.stage_operations:
        # The value crosses every boundary from the stage that makes it to its last user.
        for boundary in range(stage_of[node], last_use.get(node, 0)):
            crossed[boundary].append(node)
    return crossed


def _moving_sources(trace: ModelTrace, node: fx.Node) -> Iterable[fx.Node]:
    """Return the values that an operation uses and that operations make, except constants."""
    return (s for s in node.all_input_nodes if s.op == "call_function" and s not in trace.constant)


def program(
    trace: ModelTrace,
    stage_of: Mapping[fx.Node, int],
    stages: int,
    stage: int,
    stream: RandomStream,
    gradient_handler: GradientHandler | None = None,
) -> StageProgram:
    """Return the program of `stage`.

    Args:
        trace: the trace of the model.
        stage_of: the stage of every operation.
        stages: the number of stages.
        stage: the stage to build.
        stream: the source of random numbers.
        gradient_handler: function that gets each computation of a weight gradient, and defers or
            calls the computation (`split_backward`), as for zero-bubble schedules. None if autograd
            computes weight gradients, or if the program has no backward.
    """
    crossed = crossing(trace, stage_of, stages)
    received = crossed[stage - 1] if stage > 0 else []
    leaving = crossed[stage] if stage < stages - 1 else []
    own = [node for node in trace.stage_operations if stage_of[node] == stage]
    last = stage == stages - 1
    outputs = [leaf for leaf in trace.outputs if isinstance(leaf, fx.Node)]
    return _Builder(trace, stream, gradient_handler).build(
        own=own,
        received=received,
        leaving=leaving,
        results=outputs if last else leaving,
        last=last,
    )


def _shape(placeholder: fx.Node) -> torch.Size | None:
    """Return the shape of an input; None for an input that is no tensor."""
    value = placeholder.meta["val"]
    return value.shape if isinstance(value, torch.Tensor) else None


class _Builder:
    """Builder that copies operations of a trace into a separate graph."""

    def __init__(
        self, trace: ModelTrace, stream: RandomStream, gradient_handler: GradientHandler | None
    ) -> None:
        self.trace = trace
        self.stream = stream
        self.gradient_handler = gradient_handler
        self.graph = fx.Graph()
        # Copies in this graph, by node of the trace.
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
    ) -> StageProgram:
        """Return the program of these operations.

        Args:
            own: the stage's operations.
            received: the values from the stage before.
            leaving: the values for the stage after.
            results: the values that the stage returns; in the last stage these are the model's
                outputs.
            last: whether this is the last stage.
        """
        trace = self.trace
        graph = self.graph
        # A constant result is computed here, with all operations that must be in the same stage,
        # such as operations that write into the memory of the result.
        constant_results = [node for node in results if node in trace.constant]
        for node in list(constant_results):
            constant_results += trace.colocated.get(node, [])
        needed = {*trace.ancestors([*own, *constant_results]), *constant_results, *results}
        # Only the inputs that this stage reads; a stage may read none.
        inputs = [index for index, node in enumerate(trace.placeholders) if node in needed]
        # Values whose memory the stage changes in place. Buffers and parameters have names in
        # `trace.names`; any other value may share its memory with a received value.
        changed: set[fx.Node] = set()
        for node in own:
            changed.update(trace.root[value] for value in changed_by(node))
        changes_unnamed = any(value not in trace.names for value in changed)
        for node in [*received, *(trace.placeholders[index] for index in inputs)]:
            self.copies[node] = graph.placeholder(node.name)
        if changes_unnamed:
            # Backward needs the received values unchanged, so operations change clones.
            for node in received:
                self.copies[node] = graph.call_function(torch.clone, (self.copies[node],))
        for node in trace.module.graph.nodes:
            if node.op == "get_attr" and node in needed:
                self._attribute(node)
        own_set = set(own)
        # The order of the trace matters: an operation may change memory that another reads.
        for node in trace.operations:
            if node in own_set or (node in trace.constant and node in needed):
                self._operation(node)
        returned: Sequence[Any] = trace.outputs if last else results
        graph.output(
            tuple(self.copies[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in returned)
        )
        # The module has the model's parameters themselves, so that these get the gradients.
        module = fx.GraphModule(self.attributes, graph)
        changed_attributes = [value for value in changed if value in trace.names]
        return StageProgram(
            module=module,
            inputs=tuple(inputs),
            received=tuple(trace.value(node) for node in received),
            leaving=tuple(trace.value(node) for node in leaving),
            written=tuple(
                trace.names[v]
                for v in changed_attributes
                if not isinstance(trace.tensor(v), nn.Parameter)
            ),
            shapes=tuple(_shape(trace.placeholders[index]) for index in inputs),
        )

    def _attribute(self, node: fx.Node) -> None:
        """Make a parameter, buffer or constant an attribute of the program's module."""
        # The model's name names the attribute, so that tied parameters share an attribute.
        target = self.trace.names.get(node, str(node.target))
        self.attributes[target] = self.trace.tensor(node)
        self.copies[node] = self.graph.create_node("get_attr", target, name=node.name)

    def _operation(self, node: fx.Node) -> None:
        """Copy an operation into the graph, and replace its target by the executed function."""
        copy = self.graph.node_copy(node, lambda source: self.copies[source])
        self.copies[node] = copy
        # A layer of tensor parallelism is a single operation in the trace: call the layer itself.
        if is_opaque(node):
            copy.target = function_behind(node, self.trace.layers)
            return
        # A module that cannot be traced is a single operation too: call the module itself.
        if is_untraced(node):
            copy.target = block_function(node, self.trace.blocks)
        if node in self.numbers:
            on_shards = self.trace.is_on_shards(node)
            copy.target = self.stream.drawing(copy.target, self.numbers[node], on_shards)  # type: ignore[arg-type]
        elif self.gradient_handler is not None:
            copy.target = self._with_split_gradient(node, copy.target, self.gradient_handler)

    def _with_split_gradient(
        self, node: fx.Node, target: Any, gradient_handler: GradientHandler
    ) -> Any:
        """Return the function of an operation: with a separate weight gradient if that is useful.

        Otherwise the function is `target`, and autograd computes the weight gradient.
        """
        weight_position, split = split_operation(target, gradient_handler)
        # An operation without a split form, or with its weight elsewhere, stays unchanged.
        if split is None or weight_position >= len(node.args) or node.kwargs:
            return target
        weight = node.args[weight_position]
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            tensor = self.trace.tensor(weight)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and not has_hooks(tensor):
                return split if is_split_worthwhile(target, tensor, gradient_handler) else target
        return target
