"""Cut of a model by tracing, and checks that the model can be cut there.

    at = ("layer3",)             the head ends before this module computes
    at = ("2",)                  the head has the first two layers that have weights
    at = ("1", "3")              the server has the layers between; the end is at the client

A model can be cut if a pipeline can cut it (`dure.parallel.pipeline`): skip connections over the
cut are sent and counted. Tensors that one side needs from the other are refused by name: weights
that both sides use, and examples that the server's part reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import nn

from dure.collectives.compression import Compression
from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.learner import Proof
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import device_of_model, to_device
from dure.parallel.mesh.check import sample
from dure.parallel.optimizer_sharding import check_parameter_wise
from dure.parallel.pipeline.balance import costs_of
from dure.parallel.pipeline.cut import CutModel, named_starts
from dure.parallel.pipeline.program import StageProgram, program
from dure.parallel.pipeline.proof import prove_cut
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.stage import Stage
from dure.parallel.pipeline.trace import ModelTrace, leaves_of, owner_of
from dure.randomness.seeds import derive
from dure.split.batching import Batching, crossings
from dure.split.compressed import message_bytes
from dure.split.divided_model import DividedModel
from dure.split.leakage.guard import CutValue
from dure.split.optimizer_settings import check_settings
from dure.split.sides import PartyStage, Side, StageLoss, Stages, weighted_loss
from dure.tasks.loss_shares import CountedLoss


class CutStages(Stages):
    """Stages of a traced model.

    stream: source of random numbers. loss: called by the model's last stage, if this side has it.
    """

    def __init__(
        self, cut: CutModel, numbers: Sequence[int], stream: RandomStream, loss: StageLoss
    ) -> None:
        self.cut = cut
        self.model = cut.model
        self.numbers = list(numbers)
        self.stream = stream
        self._loss = loss

    def trained(self) -> dict[str, nn.Parameter]:
        mine = {name for number in self.numbers for name in self.cut.names[number]}
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name in mine and parameter.requires_grad and name in self.cut.learned
        }

    def written(self) -> list[str]:
        written: set[str] = set()
        for number in self.numbers:
            written.update(self._program(number, self.cut.examples).written)
        return sorted(written)

    def _program(self, number: int, examples: int) -> StageProgram:
        """Return the program of a stage for `examples` examples."""
        # A step is a single micro-batch, so no product accumulates into an earlier gradient.
        return self.cut.program(
            number, examples, training=True, stream=self.stream, gradient_handler=None
        )

    def stage(self, number: int) -> Stage:
        return Stage(
            number,
            last=number == self.cut.stages - 1,
            program_for=lambda examples: self._program(number, examples),
            structure_for=lambda examples: self.cut.structure(examples, True),
            loss=self._loss,
            stream=self.stream,
            remaining=None,
        )

    def arriving(self, number: int, examples: int) -> int:
        return sum(value.differentiable for value in self._program(number, examples).received)

    def without_gradient(self, stages: Mapping[int, PartyStage], missed: int) -> Sequence[str]:
        # The trace covers the whole model: the bits refer to the values its last stage received.
        return self.cut.without_gradient(missed) if missed else ()

    def passed_on(self, stage: PartyStage, missed: int) -> int:
        return missed


class TracedDividedModel(DividedModel):
    """A model that is cut by tracing.

    Args:
        task: the task.
        model: the model.
        at: the places of the cuts.
        examples: number of examples of a batch.
        seed: the run's seed.
        losses: the loss, which counts the clients' batches.

    Raises:
        ValueError: as `cut_at`.
    """

    head_is_known = True

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        at: Sequence[str],
        examples: int,
        seed: int,
        losses: CountedLoss,
    ) -> None:
        self.task = task
        self.cut = cut_at(task, model, at, examples)
        self.examples = examples
        self.at = tuple(at)
        self.losses = losses
        # Every operation has its own seed, so the sides need not exchange generator states.
        self._stream = RandomStream(derive(seed, "split"), carried=False)
        self._loss = self._stream.drawing(weighted_loss(losses), -1)

    @cached_property
    def heads(self) -> Side:
        return self._side([0, 2] if self.cut.stages == 3 else [0])

    @cached_property
    def tails(self) -> Side:
        return self._side([1])

    def _side(self, numbers: Sequence[int]) -> Side:
        return Side(CutStages(self.cut, numbers, self._stream, self._loss), self.task)

    @cached_property
    def shares(self) -> Sequence[float]:
        return shares_of(self.cut)

    @property
    def weights(self) -> Sequence[int]:
        sides = {0: self.heads, 1: self.tails, 2: self.heads}
        return [
            sum(one.numel() for name, one in sides[stage].parameters.items() if name in names)
            for stage, names in enumerate(self.cut.names)
        ]

    def message_bytes(self, compression: Compression) -> list[tuple[int, int]]:
        boundaries = range(self.cut.stages - 1)
        return [message_bytes(compression, self.cut, one, self.examples) for one in boundaries]

    @property
    def batching(self) -> Callable[[Sequence[int]], Batching]:
        return self._batching

    def _batching(self, sizes: Sequence[int]) -> Batching:
        return Batching(partial(self.crossings, sizes[0], sum(sizes)), sizes)

    def crossings(self, few: int, many: int) -> list[list[CutValue]]:
        boundaries = range(self.cut.stages - 1)
        return [crossings(self.cut, one, sizes=(few, many)) for one in boundaries]


def check_at(at: Sequence[str]) -> None:
    """Raise ValueError unless there are one or two cuts."""
    if len(at) not in (1, 2):
        raise ValueError(
            f"cut names {len(at)} places, but a model is cut once, or twice if its end stays with "
            "the client: give a module's name or a number of layers, or two of them"
        )


def cut_at(task: Task, model: nn.Module, at: Sequence[str], examples: int) -> CutModel:
    """Return the model cut at these places, for batches of `examples` examples.

    Raises ValueError for places that the model does not have, or at which it cannot be cut.
    """
    check_at(at)
    train, test = examples_for(task)
    device = device_of_model(model)

    def sample_of(source: Examples, count: int) -> Any:
        return to_device(sample(source, count), device)

    cut = CutModel(
        model,
        partial(sample_of, train),
        stages=len(at) + 1,
        examples=examples,
        test=None if test is None else partial(sample_of, test),
    )
    cut.decide(starts_of(cut.reference, at))
    _check_apart(cut)
    return cut


def starts_of(trace: ModelTrace, at: Sequence[str]) -> list[int]:
    """Return the indices of the operations before which the model is cut."""
    starts = [
        _after_layers(trace, int(place)) if place.isdigit() else named_starts(trace, [place])[0]
        for place in at
    ]
    if len(starts) == 2 and starts[0] >= starts[1]:
        raise ValueError(
            f"the second cut, at {at[1]}, is not after the first, at {at[0]}: the server would "
            "have no layers"
        )
    return starts


def _after_layers(trace: ModelTrace, count: int) -> int:
    """Return the index at which the layer after the first `count` layers with weights begins."""
    if count < 1:
        raise ValueError(
            f"the model cannot be cut after {count} layers: the head needs at least one"
        )
    layers: list[str] = []
    for place, node in enumerate(trace.stage_operations):
        weights = any(source in trace.names for source in trace.attributes(node))
        owner = owner_of(node)
        if weights and owner not in layers:
            layers.append(owner)
            if len(layers) == count + 1:
                return place
    raise ValueError(
        f"the model cannot be cut after {count} layers: it has {len(layers)} that have weights"
    )


def _check_apart(cut: CutModel) -> None:
    """Raise ValueError if a side would need tensors of the other."""
    for name, stages in cut.holders.items():
        server = [stage for stage in stages if stage == 1]
        if server and len(stages) > 1:
            raise ValueError(
                f"{name} is used on both sides of the cut, but each side has its own weights: cut "
                "the model elsewhere"
            )
    homes = cut.homes(cut.examples, True)
    stream = RandomStream(0, carried=False)
    if program(cut.reference, homes, stages=cut.stages, stage=1, stream=stream).inputs:
        raise ValueError(
            "the server's part reads the examples, which stay with the client: cut the model "
            "after all layers that read them, or return the values from the head"
        )
    if cut.changed:
        raise ValueError(
            f"{cut.changed[0]} changes in a forward pass (as by max_norm), so clients would "
            "diverge: leave that out"
        )


def check_optimizer(task: Task, model: nn.Module) -> None:
    """Raise ValueError for an optimizer that cannot be divided between the sides.

    Such an optimizer uses the weights of both sides at once, or its steps change settings that can
    neither be saved nor sent.
    """
    optimizer = task.optimizer(list(model.parameters()))
    check_parameter_wise(optimizer)
    check_settings(optimizer)


def shares_of(cut: CutModel) -> list[float]:
    """Return the estimated share of each stage in the operations of the model."""
    inputs = leaves_of(cut.inputs(cut.examples, True))
    costs = costs_of(cut.reference, "estimated", inputs).own
    bounds = [0, *cut.starts, len(costs)]
    total = sum(costs) or 1.0
    return [sum(costs[bounds[n] : bounds[n + 1]]) / total for n in range(cut.stages)]


def prove(task: Task, model: nn.Module, cut: CutModel) -> Proof | None:
    """Compare the parts of a cut copy with the undivided model; the model is unchanged.

    Returns None if the task returns the same model object each time. Raises ValueError if the two
    differ.
    """
    started = time.perf_counter()
    twin = unused_copy(model, task, 0)
    # A task may return the same model object each time, so there is no copy.
    if twin is cut.model or twin is model:
        return None
    train, _ = examples_for(task)
    prove_cut(
        cut,
        twin,
        others=to_device(sample(train, cut.examples, backwards=True), device_of_model(cut.model)),
        evaluation=0,
        parts_gradients=False,
        recompute=False,
    )
    what = "the parts compute what the undivided model computes"
    return Proof(what, time.perf_counter() - started)
