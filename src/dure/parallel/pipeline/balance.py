"""Positions at which to cut a model, so that stages take equal time or need equal memory.

With c(i, j) the cost of a stage of operations i … j-1 and of the message that leaves the stage, the
best cut minimises

    max over stages of c(i, j)

Dynamic programming over all positions finds the minimum exactly in O(stages x operations^2), with a
single vector operation per position. Among the cuts within 2 % of the minimum, the cut that sends
the fewest bytes over its boundaries is taken.

Costs of an operation:
    estimated  floating-point operations, counted, and the time to write its output, at 30 GFLOP/s
    measured   seconds, forward and backward, on a micro-batch: the best of three
    memory     bytes: parameters four times (gradient, two states of Adam), outputs once for each
               micro-batch that is in flight in 1F1B

A message takes its bytes at 1 GB/s.

Source: the linear partition problem, Skiena 2020, "The Algorithm Design Manual", section 10.7.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from dure.parallel.pipeline.opaque_modules import block_function, block_of, is_untraced
from dure.parallel.pipeline.trace import ModelTrace, is_unpacking, origin_of
from dure.parallel.tensor.opaque import function_behind, is_opaque, opens
from dure.randomness.seeds import generators_state, restore_generators

Balance = Literal["estimated", "measured", "memory"]

SPEED = 3e10
"""Floating-point operations per second."""
LINK = 1e9
"""Bytes of a message per second."""
WORK_OF_AN_ELEMENT = 10
"""Floating-point operations that take as long as writing an element of an output."""
SLACK = 1.02
"""Largest ratio to the minimal cost of a cut that is chosen because it sends fewer bytes."""


@dataclass(frozen=True)
class Costs:
    """Costs of each operation of `ModelTrace.stage_operations`.

    own: cost of each operation. crossing: bytes that would travel if the model were cut before the
    operation. link: cost of a byte of a message.
    """

    own: tuple[float, ...]
    crossing: tuple[int, ...]
    link: float


IMPOSSIBLE = 1 << 60
"""Bytes that stand for a position at which the model must not be cut."""


def costs_of(trace: ModelTrace, balance: Balance, inputs: Sequence[Any]) -> Costs:
    """Return the costs of a trace's operations.

    inputs: the leaves of a micro-batch's inputs; only "measured" uses them.
    """
    if balance == "memory":
        return Costs(tuple(_memory(trace)), tuple(crossing_bytes(trace)), 0.0)
    own = (
        measured(trace, inputs)
        if balance == "measured"
        else [_estimated(trace, node) for node in trace.stage_operations]
    )
    return Costs(tuple(own), tuple(crossing_bytes(trace)), 1 / LINK)


def crossing_bytes(trace: ModelTrace) -> list[int]:
    """Return the bytes made before and used after each position in `trace.stage_operations`."""
    place = {node: index for index, node in enumerate(trace.stage_operations)}
    last: dict[fx.Node, int] = {}
    for node in trace.stage_operations:
        for source in node.all_input_nodes:
            if source in place:
                last[source] = place[node]
    for leaf in trace.outputs:
        if isinstance(leaf, fx.Node) and leaf in place:
            last[leaf] = len(place)
    # Each value adds its bytes at its creation and subtracts them after its last use; the running
    # sum of these steps is the traffic at each position.
    steps = numpy.zeros(len(place) + 2, dtype=numpy.int64)
    for node, until in last.items():
        if isinstance(node.meta["val"], Tensor):
            # An element of a tuple was made when the tuple was made.
            made = place[origin_of(node)]
            steps[made + 1] += trace.value(node).nbytes
            steps[until + 1] -= trace.value(node).nbytes
    crossing = [int(nbytes) for nbytes in steps.cumsum()[: len(place)]]
    # places where no stage may begin cost more than any message
    never = [
        inside or place in trace.inseparable for place, inside in enumerate(inside_divided(trace))
    ]
    return [IMPOSSIBLE if here else nbytes for here, nbytes in zip(never, crossing, strict=True)]


def inside_divided(trace: ModelTrace) -> list[bool]:
    """Return whether a cut is inside a divided region, for each position in `stage_operations`."""
    inside = []
    open_ = False
    for node in trace.stage_operations:
        inside.append(open_)
        change = opens(node)
        # An operation that neither opens nor closes a region leaves the state unchanged.
        open_ = change > 0 or (open_ and change == 0)
    return inside


def _estimated(trace: ModelTrace, node: fx.Node) -> float:
    """Return the estimated seconds of an operation, forward and backward."""
    elements = sum(leaf.numel() for leaf in _tensors(node.meta["val"]))
    # Backward computes two products for each product of forward, so three in all.
    return 3 * (_flops(trace, node) + WORK_OF_AN_ELEMENT * elements) / SPEED


def _flops(trace: ModelTrace, node: fx.Node) -> float:
    """Return the floating-point operations of an operation's forward."""

    def without_data(leaf: Any) -> Any:
        found = trace.tensor(leaf) if isinstance(leaf, fx.Node) and leaf.op == "get_attr" else leaf
        found = found.meta["val"] if isinstance(found, fx.Node) else found
        return tree_map(lambda t: bare(t) if isinstance(t, Tensor) else t, found)

    def bare(tensor: Tensor) -> Tensor:
        # On the device "meta" operations are faster than on the fake tensors that a trace has.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    if is_opaque(node):
        return _products(trace, node)
    if is_untraced(node):
        return block_of(node, trace.blocks).call.flops
    factors: list[fx.Node] = []
    fx.node.map_arg((node.args, dict(node.kwargs)), factors.append)
    if is_unpacking(node) or len(factors) < 2:
        # A product has two factors, which may be the same node; nothing else is worth counting.
        return 0.0
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), without_data)
            node.target(*args, **kwargs)  # type: ignore[operator]
        return float(counter.get_total_flops())
    except Exception:
        # Some operations cannot be computed without data.
        return _products(trace, node)


def _products(trace: ModelTrace, node: fx.Node) -> float:
    """Return the floating-point operations of products of an operation's weights with its rows."""
    used = map(trace.tensor, trace.attributes(node))
    weights = [tensor for tensor in used if isinstance(tensor, nn.Parameter)]
    ends = _tensors(node.meta["val"])[:1]
    if is_opaque(node):
        # The input or the output of a divided layer may be a shard; the other one has all rows.
        ends += _tensors(node.all_input_nodes[0].meta["val"])
    rows = max((leaf.numel() / leaf.shape[-1] for leaf in ends if leaf.dim()), default=1)
    return 2 * rows * sum(weight.numel() for weight in weights if weight.dim() > 1)


def measured(trace: ModelTrace, inputs: Sequence[Any], repeats: int = 3) -> list[float]:
    """Return the seconds of each operation, forward and backward: the best of `repeats` runs."""
    before = generators_state()
    # Measuring must change nothing: neither buffers nor generators.
    buffers = {name: buffer.clone() for name, buffer in trace.module.named_buffers()}
    best = [float("inf")] * len(trace.stage_operations)
    for _ in range(repeats):
        timer = _Timer(trace)
        with torch.no_grad():
            # The inputs are leaves already, so skip the trace's flattening of inputs and outputs.
            timer.run(*inputs, enable_io_processing=False)
        seconds = [timer.seconds[node] for node in trace.stage_operations]
        best = list(map(min, best, seconds))
    with torch.no_grad():
        for name, buffer in trace.module.named_buffers():
            buffer.copy_(buffers[name])
    restore_generators(before)
    return best


class _Timer(fx.Interpreter):
    """Interpreter of a trace that times each operation separately, forward and backward."""

    def __init__(self, trace: ModelTrace) -> None:
        super().__init__(trace.module)
        self.layers = trace.layers
        self.blocks = trace.blocks
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run and time an operation, forward and backward, on copies; no gradient is left."""
        if n.op != "call_function" or is_unpacking(n):
            self.seconds[n] = 0.0
            return super().run_node(n)
        args, kwargs = tree_map(_alone, self.fetch_args_kwargs_from_env(n))
        operation: Any = n.target
        if is_opaque(n):
            operation = function_behind(n, self.layers)
        elif is_untraced(n):
            operation = block_function(n, self.blocks)
        with torch.enable_grad():
            started = time.perf_counter()
            outputs = operation(*args, **kwargs)
            ends = [leaf for leaf in _tensors(outputs) if leaf.requires_grad]
            if ends:
                sources = [
                    leaf for leaf in _tensors((args, kwargs)) if leaf.requires_grad and leaf.is_leaf
                ]
                ones = [torch.ones_like(end) for end in ends]
                torch.autograd.grad(ends, sources, ones, allow_unused=True)
            self.seconds[n] = time.perf_counter() - started
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def _alone(leaf: Any) -> Any:
    """Return a copy of a value that an operation may write to, detached from the graph."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    if not leaf.is_floating_point():
        return leaf
    # The product is no leaf of the graph, so that the operation may write into it.
    return leaf.detach().clone().requires_grad_().mul(1)


def _memory(trace: ModelTrace) -> list[float]:
    """Return the bytes that each operation adds to its stage, as the module describes."""
    counted: set[fx.Node] = set()
    costs = []
    for node in trace.stage_operations:
        # A parameter that several operations use is stored once; its first operation is charged.
        new = [source for source in trace.attributes(node) if source not in counted]
        counted.update(new)
        weights = sum(t.nbytes for t in map(trace.tensor, new) if isinstance(t, nn.Parameter))
        made = [] if is_unpacking(node) else _tensors(node.meta["val"])
        outputs = sum(leaf.numel() * leaf.dtype.itemsize for leaf in made)
        costs.append(float(4 * weights + outputs))
    return costs


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def best_starts(costs: Costs, stages: int) -> list[int]:
    """Return the start positions of stages 1 … that minimise the cost of the dearest stage.

    There must be at least as many operations as stages.
    """
    n = len(costs.own)
    sums = numpy.concatenate([[0.0], numpy.cumsum(costs.own)])
    # Nothing leaves the last stage.
    leaving = numpy.append(numpy.asarray(costs.crossing, dtype=float), 0.0)

    def dearest(least: numpy.ndarray, end: int, start: slice) -> numpy.ndarray:
        result: numpy.ndarray = numpy.maximum(
            least[start], sums[end] - sums[start] + costs.link * leaving[end]
        )
        return result

    # First find the lowest possible cost of the most expensive stage. Then, among all cuts whose
    # stages cost at most `SLACK` times that, take the cut that sends the fewest bytes.
    bound = SLACK * _path(n, stages, dearest)[0]

    def bytes_within(least: numpy.ndarray, end: int, start: slice) -> numpy.ndarray:
        # a stage above the bound makes its division infinitely expensive
        fits = sums[end] - sums[start] + costs.link * leaving[end] <= bound
        result: numpy.ndarray = numpy.where(fits, least[start] + leaving[end], numpy.inf)
        return result

    return _path(n, stages, bytes_within)[1]


def _path(n: int, stages: int, join: Any) -> tuple[float, list[int]]:
    """Return the least value of a division of n operations, and the starts of its stages 1 ….

    join(least, end, start): the values of divisions whose last stage begins at each of `start` and
    ends before `end`.
    """
    # least[j]: the best value of the stages so far over the first j operations.
    least = numpy.full(n + 1, numpy.inf)
    least[0] = 0.0
    origins = []
    for stage in range(1, stages + 1):
        following = numpy.full(n + 1, numpy.inf)
        origin = numpy.zeros(n + 1, dtype=int)
        # Every stage has at least one operation, which bounds where this stage may end.
        for end in range(stage, n - (stages - stage) + 1):
            start = slice(stage - 1, end)
            values = join(least, end, start)
            # argmin returns the first of equal values, so that equal costs give equal cuts
            best = int(values.argmin())
            following[end] = values[best]
            origin[end] = best + stage - 1
        least = following
        origins.append(origin)
    starts = []
    end = n
    for origin in reversed(origins):
        end = int(origin[end])
        starts.append(end)
    return float(least[n]), starts[::-1][1:]
