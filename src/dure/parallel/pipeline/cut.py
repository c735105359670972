"""A model that is cut into stages: at named modules, or automatically with balanced stages.

All ranks build the same model and trace it; each rank keeps the parameters of its own stages and
frees the others. All ranks use rank 0's cut. The cut is made on a single trace, in training mode.
Traces of other sizes and of evaluation follow it: their operations go to the stages of their
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec

from dure.parallel.gradients import is_dense
from dure.parallel.pipeline.balance import Balance, Costs, best_starts, costs_of, inside_divided
from dure.parallel.pipeline.leaf_modules import LeafModules
from dure.parallel.pipeline.program import (
    StageProgram,
    check_buffers,
    crossing,
    parameters_of,
    program,
    stages_of,
)
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.split_backward import GradientHandler
from dure.parallel.pipeline.trace import ModelTrace, leaves_of, origin_of, owner_of
from dure.parallel.zero.partitioned_parameters import without_gradient_checks
from dure.randomness.seeds import generators_state, restore_generators
from dure.tasks.modes import in_mode


@dataclass(frozen=True)
class StageSize:
    """Size of a stage, for tables.

    first: module of its first operation. operations: their number. parameters: number of elements.
    share: fraction of the cost of all stages. message: bytes that leave the stage for one
    micro-batch.
    """

    first: str
    operations: int
    parameters: int
    share: float
    message: int


def named_starts(trace: ModelTrace, names: Sequence[str]) -> list[int]:
    """Return the positions of the first operations of stages that begin with these modules.

    Raises ValueError for a module that computes nothing, or modules that are not in the order of
    their computation.
    """
    starts: list[int] = []
    owners = [owner_of(node) for node in trace.stage_operations]
    for name in names:
        # operations of the module itself, or of a module inside
        places = [
            index
            for index, owner in enumerate(owners)
            if owner == name or owner.startswith(f"{name}.")
        ]
        around = [
            block.call.name for block in trace.blocks if name.startswith(f"{block.call.name}.")
        ]
        if not places and around:
            raise ValueError(
                f"{name} is inside the module {around[0]}, which cannot be traced and so cannot "
                "be cut: name that module, or one after it"
            )
        if not places:
            known = ", ".join(list(dict.fromkeys(owner for owner in owners if owner))[:12])
            raise ValueError(
                f"no operation belongs to the module {name!r}, where a stage should begin; "
                f"modules with operations: {known}"
            )
        # The stage would begin at or before the preceding stage; the first stage begins at 0.
        if places[0] <= (starts[-1] if starts else 0):
            before = names[len(starts) - 1] if starts else "the first operation"
            raise ValueError(
                f"the stage at {name!r} would start at or before {before}: name modules in their "
                "order"
            )
        if inside_divided(trace)[places[0]]:
            raise ValueError(
                f"{name} is inside a divided region, between a layer divided by columns and one "
                "by rows"
            )
        starts.append(places[0])
    return starts


def kinds_of(trace: ModelTrace) -> list[tuple[str, list[str]]]:
    """Return each operation's target and the names of the parameters and buffers that it uses.

    Two traces with equal results can be cut at the same positions.
    """
    return [(str(node.target), _names_used(trace, node)) for node in trace.stage_operations]


def _names_used(trace: ModelTrace, node: fx.Node) -> list[str]:
    """Return the names of the parameters and buffers that an operation uses."""
    return [trace.names[source] for source in trace.attributes(node) if source in trace.names]


class CutModel:
    """Model in `stages` stages.

    Args:
        model: the model.
        sample: returns inputs of training for a number of examples.
        stages: the number of stages.
        examples: the number of examples of a micro-batch on which the cut is made.
        test: returns inputs of evaluation for a number of examples; by default `sample`.

    costs: costs of the operations, None until `choose` needs them. After `decide`: starts, the
    positions at which stages 1 … begin; names, the parameters and buffers of each stage; holders,
    the stages of each parameter and buffer.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Callable[[int], Any],
        stages: int,
        examples: int,
        test: Callable[[int], Any] | None = None,
    ) -> None:
        self.model = model
        self.stages = stages
        self.examples = examples
        self._sample = sample
        self._test = test or sample
        self._traces: dict[tuple[int, bool], ModelTrace] = {}
        self._homes: dict[tuple[int, bool], dict[fx.Node, int]] = {}
        self._programs: dict[tuple[int, int, bool], StageProgram] = {}
        self._untraced = LeafModules()
        self.costs: Costs | None = None
        # the trace on which the cut is made; all others follow it
        self.reference = self._traced(examples, True)

    def trace(self, examples: int, training: bool) -> ModelTrace:
        """Return the trace of a micro-batch of `examples` examples.

        Raises ValueError if the model cannot be traced with them, for example a single example if
        batch norm needs several.
        """
        try:
            return self._traced(examples, training)
        except ValueError as error:
            if not training:
                raise
            raise ValueError(
                f"a micro-batch has {examples} examples, but others have {self.examples}: choose "
                f"another batch_size, or fewer micro-batches; {error}"
            ) from error

    def inputs(self, examples: int, training: bool) -> Any:
        """Return the inputs on which a micro-batch of `examples` examples is traced."""
        # Examples of evaluation may have other shapes.
        return (self._sample if training else self._test)(examples)

    def _traced(self, examples: int, training: bool) -> ModelTrace:
        key = (examples, training)
        if key not in self._traces:
            before = generators_state()
            # Tracing leaves the model's mode and the generators as they were.
            inputs = self.inputs(examples, training)
            try:
                # Without gradients torch computes some of its layers as a single operation, which
                # could not be cut although its parameters belong to several stages.
                with (
                    in_mode(self.model, training),
                    torch.enable_grad(),
                    without_gradient_checks(self.model.parameters()),
                ):
                    self._traces[key] = ModelTrace(self.model, inputs, self._untraced)
            finally:
                restore_generators(before)
        return self._traces[key]

    def choose(self, names: Sequence[str] | None, balance: Balance) -> list[int]:
        """Return the positions at which stages 1 … should begin.

        names: the modules at which they begin; None balances the stages. Raises ValueError if the
        number of names does not fit, or if the model has fewer operations than stages.
        """
        if names is not None:
            if len(names) != self.stages - 1:
                raise ValueError(
                    f"{self.stages} stages need {self.stages - 1} modules as cuts, not "
                    f"{len(names)}: {', '.join(names) or 'none'}"
                )
            return named_starts(self.reference, names)
        self.costs = costs_of(self.reference, balance, leaves_of(self._sample(self.examples)))
        if len(self.reference.stage_operations) < self.stages:
            raise ValueError(
                f"a model of {len(self.reference.stage_operations)} operations cannot be cut into "
                f"{self.stages} stages{self._untraced.said()}"
            )
        return best_starts(self.costs, self.stages)

    def decide(self, starts: Sequence[int]) -> None:
        """Cut the model at these positions. Raises ValueError if the model cannot be cut there."""
        self._untraced.close()
        self.starts = list(starts)
        self._kinds = kinds_of(self.reference)
        homes = stages_of(self.reference, self.starts)
        check_buffers(self.reference, homes)
        empty = [stage for stage in range(self.stages) if stage not in homes.values()]
        if empty:
            raise ValueError(
                f"stage {empty[0]} would have no operations: there are "
                f"{len(self.reference.stage_operations)}, some of which cannot be separated, for "
                f"{self.stages} stages{self._untraced.said()}"
            )
        self._homes[self.examples, True] = homes
        self.names = parameters_of(self.reference, homes, self.stages)
        self.holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self.names):
            for name in names:
                # A tied parameter is in several stages, in ascending order.
                self.holders.setdefault(name, []).append(stage)

    def homes(self, examples: int, training: bool) -> dict[fx.Node, int]:
        """Return the stage of every operation of a trace."""
        key = (examples, training)
        if key not in self._homes:
            trace = self.trace(examples, training)
            # Equal operations on equal parameters can be cut at equal positions. A trace of another
            # mode may lack operations, such as dropout.
            if kinds_of(trace) == self._kinds:
                self._homes[key] = stages_of(trace, self.starts)
            else:
                self._homes[key] = stages_by_parameters(trace, self.holders)
        return self._homes[key]

    def program(
        self,
        stage: int,
        examples: int,
        training: bool,
        stream: RandomStream,
        gradient_handler: GradientHandler | None,
    ) -> StageProgram:
        """Return the program of a stage for micro-batches of `examples` examples."""
        key = (stage, examples, training)
        if key not in self._programs:
            trace = self.trace(examples, training)
            homes = self.homes(examples, training)
            self._programs[key] = program(
                trace,
                homes,
                stages=self.stages,
                stage=stage,
                stream=stream,
                gradient_handler=gradient_handler,
            )
        return self._programs[key]

    def structure(self, examples: int, training: bool) -> TreeSpec:
        """Return the structure of the model's outputs."""
        return self.trace(examples, training).structure

    @property
    def learned(self) -> frozenset[str]:
        """Parameters that the gradient reaches."""
        return self.reference.learned

    def without_gradient(self, missed: int) -> list[str]:
        """Return the parameters without a gradient because the loss does not depend on all outputs.

        missed: a bit mask of the differentiable values that the last stage receives; a bit is set
        if the value got no gradient. The last stage's own parameters are not listed, because that
        stage finds them itself.
        """
        trace = self.reference
        arriving = crossing(trace, self.homes(self.examples, True), self.stages)[-1]
        arriving = [node for node in arriving if trace.value(node).differentiable]
        reached = [node for place, node in enumerate(arriving) if not missed >> place & 1]
        learned = trace.learned_from(reached)
        last = self.stages - 1
        return [
            name
            for name in sorted(self.learned - learned)
            if last not in self.holders.get(name, ())
        ]

    @property
    def changed(self) -> list[str]:
        """Parameters that a forward pass changes."""
        trace = self.reference
        changed = [value for value in trace.names if value in trace.changed]
        return sorted(
            trace.names[value] for value in changed if isinstance(trace.tensor(value), nn.Parameter)
        )

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers in training."""
        return bool(self.reference.numbers_of_draws())

    def message_bytes(self, boundary: int, examples: int, training: bool = True) -> tuple[int, int]:
        """Return bytes of a micro-batch's values and gradients at the boundary after a stage."""
        trace = self.trace(examples, training)
        nodes = crossing(trace, self.homes(examples, training), self.stages)[boundary]
        values = [trace.value(node) for node in nodes]
        return sum(v.nbytes for v in values), sum(v.nbytes for v in values if v.differentiable)

    def sizes(self) -> list[StageSize]:
        """Return the sizes of the stages, for a table."""
        moving = self.reference.stage_operations
        # A cut by names has needed no costs: then shares are nan.
        costs = self.costs.own if self.costs is not None else []
        total = sum(costs)
        bounds = [0, *self.starts, len(moving)]
        parameters = dict(self.model.named_parameters())
        sizes = []
        for stage in range(self.stages):
            start = bounds[stage]
            end = bounds[stage + 1]
            elements = sum(
                parameters[name].numel() for name in self.names[stage] if name in parameters
            )
            message = self.message_bytes(stage, self.examples)[0] if stage < self.stages - 1 else 0
            size = StageSize(
                first=owner_of(moving[start]),
                operations=end - start,
                parameters=elements,
                share=sum(costs[start:end]) / total if total else float("nan"),
                message=message,
            )
            sizes.append(size)
        return sizes


def stages_by_parameters(
    trace: ModelTrace, holders: Mapping[str, Sequence[int]]
) -> dict[fx.Node, int]:
    """Return the stages of another trace's operations: each goes to its parameters' stage.

    Stages are in ascending order; an operation without parameters goes to the stage of the
    operation before. Raises ValueError if an operation would have to go back to an earlier stage.
    """
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for place, node in enumerate(trace.stage_operations):
        names = _names_used(trace, node)
        homes = {name: holders[name] for name in names if name in holders}
        # Advance to the next stage that has this parameter, until the stage has all parameters of
        # the operation.
        while any(stage not in stages for stages in homes.values()):
            name, stages = next(item for item in homes.items() if stage not in item[1])
            later = [home for home in stages if home > stage]
            # No stage can begin inside operations that must stay together.
            if not later or place in trace.inseparable:
                raise ValueError(
                    f"{name} is in stage {stages[-1]}, but in this mode or size the model uses it "
                    f"together with or after operations of stage {stage}: cut it elsewhere"
                )
            stage = later[0]
        # An operation that unpacks a result stays with the operation that made the result.
        stage_of[node] = stage_of.get(origin_of(node), stage)
    return stage_of


def release_tensors(model: nn.Module, names: Sequence[str]) -> None:
    """Free the memory of these parameters and buffers; names, shapes and strides stay.

    The values are zeros from then on. Strides must equal those on the ranks that keep the tensors;
    otherwise later traces would differ between ranks.
    """
    own = set(names)
    gone = [parameter for name, parameter in model.named_parameters() if name in own]
    # All of them share a single range of zeros, which takes little of the address space.
    shared = _zeros(max((one.nbytes for one in gone if one.device.type == "cpu"), default=0))
    with torch.no_grad():
        # The objects stay, because the optimizer and the trace refer to them.
        for parameter in gone:
            parameter.data = _untouched(parameter, shared)
        for name, buffer in model.named_buffers():
            # Passes may write into buffers, so each buffer gets separate zeros.
            if name in own:
                buffer.data = _untouched(buffer, _zeros(buffer.nbytes))


def _zeros(nbytes: int) -> Tensor:
    """Return bytes that take no memory until they are written to."""
    # numpy asks the system for zeroed pages; torch.zeros writes.
    return torch.from_numpy(numpy.zeros(nbytes, numpy.uint8))


def _untouched(like: Tensor, zeros: Tensor) -> Tensor:
    """Return zeros of this shape, as a view of `zeros`; on a GPU a single zero, expanded."""
    if like.device.type != "cpu":
        return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
    own = zeros[: like.nbytes].view(like.dtype)
    return own.as_strided(like.shape, like.stride()) if is_dense(like) else own.view(like.shape)
