"""Execution of a stage: forward and backward of its micro-batches, and the state between the two.

    forward   values received, inputs  ->  values leaving
              stores the graph, or the received values in order to recompute the graph
    backward  gradients of the leaving values  ->  gradients of the received values and the weights

A value that passes through a stage is both received and leaving, and so is its gradient. The last
stage computes the loss. A micro-batch adds its share of the loss (`dure.tasks.loss_shares`), so
that the sum of the gradients is the gradient of the batch.

Batch normalisation sees a micro-batch, as it does with accumulated gradients, and updates its
running statistics with each micro-batch; recomputation leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from dure.parallel.pipeline.program import StageProgram
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.split_backward import DeferredGradients
from dure.parallel.pipeline.trace import leaves_of
from dure.tasks.loss_shares import ComputedLoss, LossShare
from dure.tensors.backward import backward_from


@dataclass
class Microbatch:
    """Micro-batch of `examples` examples. share: its share of the batch.

    read: returns inputs and targets; called once, by the stages that use them.
    """

    examples: int
    share: LossShare
    read: Callable[[], tuple[Any, Any]]

    @cached_property
    def content(self) -> tuple[Any, Any]:
        """Inputs and targets; read at the first access."""
        return self.read()

    @cached_property
    def inputs(self) -> list[Any]:
        """Leaves of the model's inputs."""
        return leaves_of(self.content[0])

    @property
    def targets(self) -> Any:
        """Targets of the examples."""
        return self.content[1]


@dataclass
class _Kept:
    """Tensors that a micro-batch needs for its backward pass."""

    received: list[Tensor]
    ends: list[Tensor] = field(default_factory=list)
    state: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Stage:
    """A single stage of a model.

    Args:
        number: the stage's number.
        last: whether this is the last stage.
        program_for: returns the stage's program for a number of examples.
        structure_for: returns the structure of the model's outputs; only the last stage uses it.
        loss: takes outputs, targets, the number of examples and their share, and returns their part
            of the batch's loss; only the last stage uses it.
        stream: source of random numbers.
        remaining: list to which weight gradients are deferred; None computes them at once.
        recompute: whether to store only the received values and to recompute the graph for
            backward; ignored in the last stage, which runs backward right after forward.
        trains: False for forward alone, without a graph and without stored values.
    """

    def __init__(
        self,
        number: int,
        last: bool,
        program_for: Callable[[int], StageProgram],
        structure_for: Callable[[int], TreeSpec],
        loss: Callable[[Any, Any, int, LossShare], ComputedLoss],
        stream: RandomStream,
        remaining: DeferredGradients | None,
        recompute: bool = False,
        trains: bool = True,
    ) -> None:
        self.number = number
        self.last = last
        self.trains = trains
        # In 1F1B the last stage runs backward right after forward, so recomputation would save
        # nothing.
        self.recompute = recompute and not last
        self.program_for = program_for
        self._structure_for = structure_for
        self._loss = loss
        self._stream = stream
        self._remaining = remaining
        self._kept: dict[int, _Kept] = {}
        self._weights: dict[int, list[Callable[[], None]]] = {}
        self.losses: dict[int, float] = {}
        self.counts: dict[int, float] = {}
        self.reached: set[int] = set()
        """Indices of the differentiable received values that got a gradient in this step."""

    def begin(self, step: int) -> None:
        """Begin a step; drop the state of an interrupted step."""
        self.step = step
        self._kept.clear()
        self._weights.clear()
        if self._remaining is not None:
            self._remaining.clear()
        self.losses.clear()
        self.counts.clear()
        self.reached.clear()

    def forward(self, number: int, batch: Microbatch, received: Sequence[Tensor]) -> list[Tensor]:
        """Compute micro-batch `number`; return the leaving values, detached from the graph.

        Raises ValueError if the shape of the inputs is not the shape of the trace.
        """
        program = self.program_for(batch.examples)
        # Received values are the leaves of this stage's graph; backward leaves their gradients in
        # `grad`.
        values = [
            tensor.detach().requires_grad_(value.differentiable and self.trains)
            for tensor, value in zip(received, program.received, strict=True)
        ]
        kept = _Kept(values)
        if self.trains:
            self._kept[number] = kept
        self._stream.at(self.step, number)
        if not self.trains:
            ends = self._run(program, number, batch, values)
        elif self.recompute:
            kept.state = self._stream.state() if self._stream.carried else None
            # Recomputation has to see the buffers as they were before this forward changed them.
            kept.buffers = {
                name: program.module.get_buffer(name).clone() for name in program.written
            }
            # no graph: only received values are stored until backward
            with torch.no_grad():
                ends = self._run(program, number, batch, values)
        else:
            ends = kept.ends = self._run(program, number, batch, values)
        if self.last:
            self.losses[number] = float(ends[0].item())
            return []
        # The graph stays here; only values travel.
        return [end.detach() for end in ends]

    def _run(
        self, program: StageProgram, number: int, batch: Microbatch, values: Sequence[Tensor]
    ) -> list[Tensor]:
        inputs = [batch.inputs[index] for index in program.inputs] if program.inputs else []
        # A trace is valid for a single shape; for another shape it may compute wrong values without
        # an error.
        for given, shape in zip(inputs, program.shapes, strict=False):
            if shape is not None and given.shape != shape:
                raise ValueError(
                    f"examples of shape {list(given.shape[1:])} come after others of "
                    f"{list(shape[1:])}: a model that is cut needs examples of one shape"
                )
        results = program.module(*values, *inputs)
        if not self.last:
            return list(results)
        # the loss takes the model's outputs, not leaves
        outputs = tree_unflatten(list(results), self._structure_for(batch.examples))
        found = self._loss(outputs, batch.targets, batch.examples, batch.share)
        self.counts[number] = found.counted
        return [found.loss]

    def backward(self, number: int, batch: Microbatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Compute all gradients; return those of the received values."""
        self._descend(number, batch, gradients)
        self.weight_gradient(number)
        return self._returned(number, batch)

    def input_gradient(
        self, number: int, batch: Microbatch, gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Compute all but the deferred gradients; return those of the received values."""
        self._descend(number, batch, gradients)
        return self._returned(number, batch)

    def weight_gradient(self, number: int) -> None:
        """Compute the weight gradients that `input_gradient` deferred."""
        for compute in self._weights.pop(number, []):
            with torch.no_grad():
                compute()

    def _descend(self, number: int, batch: Microbatch, gradients: Sequence[Tensor]) -> None:
        """Run autograd from the stage's outputs or loss, and collect deferred weight gradients."""
        kept = self._kept[number]
        program = self.program_for(batch.examples)
        if self.recompute:
            self._compute_again(kept, number, batch, program)
        if self.last:
            # A loss without a gradient is an error, as everywhere.
            wanted = [(kept.ends[0], torch.ones_like(kept.ends[0]))]
        else:
            leaving = zip(kept.ends, program.leaving, strict=True)
            ends = [end for end, value in leaving if value.differentiable]
            # A frozen stage's outputs have no graph, although a gradient arrives for each.
            pairs = zip(ends, gradients, strict=True)
            wanted = [(end, gradient) for end, gradient in pairs if end.requires_grad]
        # A stage may have no trainable parameters and no differentiable inputs.
        if wanted:
            backward_from(wanted)
        if self._remaining is not None:
            # All stages of the rank share the list; its entries belong to this micro-batch.
            self._weights[number] = list(self._remaining)
            self._remaining.clear()

    def _compute_again(
        self, kept: _Kept, number: int, batch: Microbatch, program: StageProgram
    ) -> None:
        """Recompute forward with the buffers and the random numbers of the first forward.

        Buffers and generators are restored afterwards.
        """
        before = self._stream.state()
        buffers = {name: program.module.get_buffer(name) for name in program.written}
        now = {name: buffer.clone() for name, buffer in buffers.items()}
        for name, buffer in buffers.items():
            buffer.data.copy_(kept.buffers[name])
        if kept.state is not None:
            self._stream.resume_from(kept.state)
        self._stream.at(self.step, number)
        kept.ends = self._run(program, number, batch, kept.received)
        self._stream.resume_from(before)
        for name, buffer in buffers.items():
            # Write through `data`, which autograd does not track: otherwise a backward pass that
            # saved the buffer would fail because the buffer changed.
            buffer.data.copy_(now[name])

    def _returned(self, number: int, batch: Microbatch) -> list[Tensor]:
        """Return the gradients of the received values; zeros for values without a gradient."""
        kept = self._kept.pop(number)
        program = self.program_for(batch.examples)
        pairs = zip(kept.received, program.received, strict=True)
        tensors = [tensor for tensor, value in pairs if value.differentiable]
        self.reached.update(place for place, each in enumerate(tensors) if each.grad is not None)
        # The preceding stage waits for a gradient of each value, so send zeros for a missing
        # gradient.
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in tensors]
