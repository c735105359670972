"""A stage at work: forward and backward of its micro-batches, with what it keeps between the two.

    forward   values received, inputs  ->  values leaving
              keeps the graph, or, to recompute it, what was received
    backward  gradients of the leaving ones  ->  those of the received ones, and of the weights

A value that is only carried past is received and leaves, and so is its gradient. The last stage
computes the loss, of which a micro-batch adds its share (`dure.tasks.loss_shares`), so that the sum
of the gradients is that of the batch.

Batch normalisation sees a micro-batch, as it does with accumulated gradients, and updates its
running statistics with each; recomputation leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from dure.parallel.pipeline.apart import Remaining
from dure.parallel.pipeline.draws import Stream
from dure.parallel.pipeline.program import Program
from dure.parallel.pipeline.trace import leaves_of
from dure.tasks.loss_shares import Computed, Share
from dure.tensors.backward import backward_from


@dataclass
class Microbatch:
    """A micro-batch of so many examples. share: of its batch.

    read: gives inputs and targets; called once, by the stages that use them.
    """

    examples: int
    share: Share
    read: Callable[[], tuple[Any, Any]]

    @cached_property
    def content(self) -> tuple[Any, Any]:
        """Inputs and targets, as they were read."""
        return self.read()

    @cached_property
    def inputs(self) -> list[Any]:
        """The leaves of the model's inputs."""
        return leaves_of(self.content[0])

    @property
    def targets(self) -> Any:
        return self.content[1]


@dataclass
class _Kept:
    """What a micro-batch needs for its backward pass."""

    received: list[Tensor]
    ends: list[Tensor] = field(default_factory=list)
    state: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Stage:
    """One stage.

    program_for: its program for a micro-batch of so many examples.
    structure_for: of the model's outputs; loss: of outputs, targets, so many examples and their
        share, what they add to the loss of the batch; both are the last stage's.
    stream: from where its operations draw.
    remaining: where weight gradients are left for later; None where they are computed at once.
    recompute: keeps what was received and computes the rest again for backward, but not in the last
        stage, which goes backward at once.
    trains: False where nothing goes backward, and nothing is kept.
    """

    def __init__(
        self,
        number: int,
        last: bool,
        program_for: Callable[[int], Program],
        structure_for: Callable[[int], TreeSpec],
        loss: Callable[[Any, Any, int, Share], Computed],
        stream: Stream,
        remaining: Remaining | None,
        recompute: bool = False,
        trains: bool = True,
    ) -> None:
        self.number = number
        self.last = last
        self.trains = trains
        # In 1F1B the last stage goes backward right after forward: to compute again would save
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
        """Which of the received values that have a gradient got one in this step, by place."""

    def begin(self, step: int) -> None:
        """A step begins; what an interrupted one has left is dropped."""
        self.step = step
        self._kept.clear()
        self._weights.clear()
        if self._remaining is not None:
            self._remaining.clear()
        self.losses.clear()
        self.counts.clear()
        self.reached.clear()

    def forward(self, number: int, batch: Microbatch, received: Sequence[Tensor]) -> list[Tensor]:
        """Computes micro-batch `number`; returns what leaves, cut from the graph."""
        program = self.program_for(batch.examples)
        # What was received begins this stage's graph; backward leaves in its `grad` what goes back.
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
            # no graph: only what was received is held until backward
            with torch.no_grad():
                ends = self._run(program, number, batch, values)
        else:
            ends = kept.ends = self._run(program, number, batch, values)
        if self.last:
            self.losses[number] = float(ends[0].item())
            return []
        # The graph stays here; only values go on.
        return [end.detach() for end in ends]

    def _run(
        self, program: Program, number: int, batch: Microbatch, values: Sequence[Tensor]
    ) -> list[Tensor]:
        inputs = [batch.inputs[index] for index in program.inputs] if program.inputs else []
        # A trace holds for one shape; what it would compute for another is wrong, and maybe no
        # error.
        for given, shape in zip(inputs, program.shapes, strict=False):
            if shape is not None and given.shape != shape:
                raise ValueError(
                    f"examples of shape {list(given.shape[1:])} come after others of "
                    f"{list(shape[1:])}: a model that is cut needs all of one shape"
                )
        results = program.module(*values, *inputs)
        if not self.last:
            return list(results)
        # the loss takes what the model gives, not leaves
        outputs = tree_unflatten(list(results), self._structure_for(batch.examples))
        found = self._loss(outputs, batch.targets, batch.examples, batch.share)
        self.counts[number] = found.counted
        return [found.loss]

    def backward(self, number: int, batch: Microbatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Computes all gradients; returns those that the stage before waits for."""
        self._descend(number, batch, gradients)
        self.weight_gradient(number)
        return self._returned(number, batch)

    def input_gradient(
        self, number: int, batch: Microbatch, gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Like `backward`, but leaves the gradients of long weights to `weight_gradient`."""
        self._descend(number, batch, gradients)
        return self._returned(number, batch)

    def weight_gradient(self, number: int) -> None:
        """Computes the gradients of long weights that `input_gradient` has left."""
        for compute in self._weights.pop(number, []):
            with torch.no_grad():
                compute()

    def _descend(self, number: int, batch: Microbatch, gradients: Sequence[Tensor]) -> None:
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
            # A frozen stage's ends have no graph, though a gradient comes for each.
            pairs = zip(ends, gradients, strict=True)
            wanted = [(end, gradient) for end, gradient in pairs if end.requires_grad]
        # A stage may have nothing that learns, and nothing before it.
        if wanted:
            backward_from(wanted)
        if self._remaining is not None:
            # The list is that of all stages of the rank; these belong to this micro-batch.
            self._weights[number] = list(self._remaining)
            self._remaining.clear()

    def _compute_again(self, kept: _Kept, number: int, batch: Microbatch, program: Program) -> None:
        """Forward once more, with the buffers and the random numbers of the first time.

        Afterwards buffers and generators are as they were before it.
        """
        before = self._stream.state()
        buffers = {name: program.module.get_buffer(name) for name in program.written}
        now = {name: buffer.clone() for name, buffer in buffers.items()}
        for name, buffer in buffers.items():
            buffer.data.copy_(kept.buffers[name])
        if kept.state is not None:
            self._stream.go_on_from(kept.state)
        self._stream.at(self.step, number)
        kept.ends = self._run(program, number, batch, kept.received)
        self._stream.go_on_from(before)
        for name, buffer in buffers.items():
            # By way of data, which autograd does not see: it would refuse a backward pass that has
            # kept a buffer which was written since.
            buffer.data.copy_(now[name])

    def _returned(self, number: int, batch: Microbatch) -> list[Tensor]:
        """The gradients of what was received; zeros where nothing depends on it."""
        kept = self._kept.pop(number)
        program = self.program_for(batch.examples)
        pairs = zip(kept.received, program.received, strict=True)
        tensors = [tensor for tensor, value in pairs if value.differentiable]
        self.reached.update(place for place, each in enumerate(tensors) if each.grad is not None)
        # The stage before waits for a gradient of each, whether there is one or not.
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in tensors]
