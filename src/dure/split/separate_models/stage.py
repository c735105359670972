"""A module as a stage of split learning, without a trace; autograd runs the backward pass.

    forward    values received, as leaves  ->  the module  ->  its output, detached from the graph
    backward   gradients of the output     ->  gradients of the leaves, and of the weights

Random numbers, such as those of dropout, are seeded by the run's seed, the part, the step and the
client: a resumed run draws the same numbers, and the undivided model draws others. Apart from
random numbers, the results have the bits of the undivided model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.parallel.pipeline.stage import Microbatch
from dure.randomness.seeds import seed_generators
from dure.split.separate_models.form import OutputForm, flatten
from dure.split.sides import StageLoss
from dure.tasks.parts import PLACES
from dure.tensors.backward import backward_from


def seed_part(seed: int, place: int, step: int, number: int) -> None:
    """Seed the random numbers of the part at this place for a client's step."""
    seed_generators(seed, "split", place, step, number, everything=True)


class _Kept(NamedTuple):
    """Graph of a batch for its backward pass: the received leaves and the outputs."""

    received: list[Tensor]
    ends: list[Tensor]


class ModuleStage:
    """A module as the stage of a party.

    Args:
        place: of the module, as in `PLACES`.
        module: the module.
        receives: form of the input; None if the input is the examples.
        gives: form of the output; None if the loss follows.
        loss: loss with shares of the batch.
        clones: whether the module writes into its input, which is then cloned.
        seed: seed of the random numbers of the module.
    """

    def __init__(
        self,
        place: int,
        module: nn.Module,
        receives: OutputForm | None,
        gives: OutputForm | None,
        loss: StageLoss,
        clones: bool,
        seed: int,
    ) -> None:
        self.place = place
        self.module = module
        self.who = f"the {PLACES[place]}"
        self.receives = receives
        self.gives = gives
        self.clones = clones
        self.seed = seed
        self._loss = loss
        self._kept: dict[int, _Kept] = {}
        self._step = 0
        self._ways: list[Any] = []
        self._leaves: list[Tensor] = []
        self.losses: dict[int, float] = {}
        self.counts: dict[int, float] = {}
        self.reached: set[int] = set()

    def begin(self, step: int) -> None:
        self._step = step
        self._kept.clear()
        self.release()
        self.losses.clear()
        self.counts.clear()
        self.reached.clear()

    def forward(self, number: int, batch: Microbatch, received: Sequence[Tensor]) -> list[Tensor]:
        """Run the module, and the loss if the loss follows; return the detached output.

        Raises ValueError for values of another form than agreed.
        """
        seed_part(self.seed, self.place, self._step, number)
        leaves = self._leaves_of(received, batch.examples)
        outputs = self._called(self._inputs(leaves, batch))
        if self.gives is not None:
            ends = self._leaving(outputs, self.gives, batch.examples)
            self._kept[number] = _Kept(leaves, ends)
            # The graph stays at this party; only values are sent.
            return [end.detach() for end in ends]
        found = self._loss(outputs, batch.targets, batch.examples, batch.share)
        self.losses[number] = float(found.loss.item())
        self.counts[number] = found.counted
        self._kept[number] = _Kept(leaves, [found.loss])
        return []

    def _leaves_of(self, received: Sequence[Tensor], examples: int) -> list[Tensor]:
        """Return the received values as leaves of this part's graph.

        The backward pass leaves the gradients to send back in their `grad`.
        """
        if self.receives is None:
            return []
        self.receives.check(received, examples, f"the {PLACES[self.place - 1]}")
        pairs = zip(received, self.receives.tensors, strict=True)
        return [
            one.laid_out(value.detach()).requires_grad_(one.differentiable) for value, one in pairs
        ]

    def _inputs(self, leaves: Sequence[Tensor], batch: Microbatch) -> Any:
        """Return the input of the module."""
        if self.receives is None:
            return batch.content[0]
        return self.receives.whole([one.clone() for one in leaves] if self.clones else leaves)

    def _called(self, inputs: Any) -> Any:
        """Return the output of the module; its buffers remain the same tensor objects."""
        before = [
            (module, name, buffer)
            for module in self.module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        outputs = self.module(inputs)
        # A pass may replace a buffer by another tensor: copy its value into the original tensor.
        for module, name, buffer in before:
            now = module._buffers.get(name)
            if now is buffer:
                continue
            if now is None or now.shape != buffer.shape or now.dtype != buffer.dtype:
                raise ValueError(
                    f"{self.who} replaces its buffer {name} by a tensor of another shape: buffers "
                    "have to keep their shapes"
                )
            buffer.data.copy_(now.detach())
            module._buffers[name] = buffer
        return outputs

    def _leaving(self, outputs: Any, gives: OutputForm, examples: int) -> list[Tensor]:
        nest, tensors = flatten(outputs, self.who)
        if nest != gives.nest:
            raise ValueError(
                f"{self.who} returns another structure, or other numbers or texts, than before "
                f"the first step, when it returned {gives}: values that are not tensors have to "
                "stay the same"
            )
        gives.check(tensors, examples, self.who)
        for value, one in zip(tensors, gives.tensors, strict=True):
            if value.requires_grad and not one.differentiable:
                raise ValueError(
                    f"{self.who} returns a value with a gradient that had none before the first "
                    "step: train the same parameters in every step"
                )
        return tensors

    def backward(self, number: int, batch: Microbatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        leaves, ends = self._kept.pop(number)
        if self.gives is None:
            # A loss that requires no gradient raises here, as in every other system.
            torch.autograd.backward(ends)
        else:
            self._descend(ends, self.gives, gradients)
        learning = [one for one in leaves if one.requires_grad]
        self._leaves = learning if self.gives is not None else []
        self.reached.update(n for n, each in enumerate(learning) if each.grad is not None)
        # The part before expects a gradient for each value: send zeros if there is none.
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in learning]

    def _descend(
        self, ends: Sequence[Tensor], gives: OutputForm, gradients: Sequence[Tensor]
    ) -> None:
        there = zip(ends, gives.tensors, strict=True)
        learning = [(end, one) for end, one in there if one.differentiable]
        self._ways = [_entry(end) for end, _ in learning]
        wanted = [
            (end, one.laid_out(gradient))
            for (end, one), gradient in zip(learning, gradients, strict=True)
            if end.requires_grad
        ]
        # The list is empty if neither this part nor a part before it has trainable weights.
        if wanted:
            backward_from(wanted)

    # Values without gradients

    def unreached(self, missed: int) -> int:
        """Return a bit mask of the received values that may have gradients and got none.

        missed: bit mask of the sent values that got none. Call this after the backward pass and
        before `release`.
        """
        lost = self.lost(missed)
        return sum(
            1 << place
            for place, leaf in enumerate(self._leaves)
            if place not in self.reached or id(leaf) in lost
        )

    def lost(self, missed: int) -> set[int]:
        """Return the ids of the tensors whose only paths in the graph lead to `missed` values."""
        if not missed:
            return set()
        ways = list(enumerate(self._ways))
        lost = _leaves_behind([way for place, way in ways if missed >> place & 1])
        return lost - _leaves_behind([way for place, way in ways if not missed >> place & 1])

    def release(self) -> None:
        """Release the graph of the newest backward pass."""
        self._ways = []
        self._leaves = []


def _entry(end: Tensor) -> Any:
    """Return the node at which this value's gradient enters autograd's graph; else None."""
    if end.grad_fn is not None:
        return end.grad_fn
    return end if end.requires_grad else None


def _leaves_behind(entries: Sequence[Any]) -> set[int]:
    """Return the ids of the graph's leaves that are reachable from these nodes."""
    found: set[int] = set()
    seen: set[Any] = set()
    ahead = [one for one in entries if one is not None]
    while ahead:
        node = ahead.pop()
        if isinstance(node, Tensor):
            found.add(id(node))
        elif node not in seen:
            seen.add(node)
            # AccumulateGrad, the node of a leaf.
            if hasattr(node, "variable"):
                found.add(id(node.variable))
            ahead += [before for before, _ in node.next_functions if before is not None]
    return found
