"""A side of the cut at work: the stages of the model that one party has, and their optimizer.

    forward    what was received  ->  what leaves
    backward   the gradients of what left  ->  those of what was received, and of the weights
    update     one step of the task's optimizer on the weights of the side

What a side has learned is an `Own`. Where many clients live in one process they share the modules
of one model: before a client computes, its own tensors take the place of those that are there
(`take`), which moves no data. The optimizer moves them by way of parameters of its own: what a
client's backward pass has kept of the modules counts as unchanged, whoever computes in between.
What a client's optimizer remembers, and the settings that it has changed, are put into the
optimizer before the client's step.

What the stages are made of is one of two: pieces of a traced model (`dure.split.cutting`), or
modules that were written apart (`dure.split.apart`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.contracts.lr_schedule import Rates
from dure.contracts.task import Task
from dure.errors import RunFolderError
from dure.parallel.pipeline.stage import Microbatch
from dure.split.messages import Own
from dure.split.optimizer_settings import (
    Settings,
    copied_value,
    keeps_settings,
    shared_of,
    tried,
)
from dure.tasks.loss_shares import Computed, CountedLoss, Share
from dure.tasks.trimming import Trimming

Loss = Callable[[Any, Any, int, Share], Computed]
"""loss(outputs, targets, examples, share), as the last stage of a pipeline has it."""


class StageAtWork(Protocol):
    """A stage of one party, which remembers what its backward passes need.

    losses, counts: what the last stage has added to the loss of a batch, and what that counts, by
    the batch's number. reached: which of the received values that have a gradient got one.
    """

    losses: dict[int, float]
    counts: dict[int, float]
    reached: set[int]

    def begin(self, step: int) -> None:
        """A step begins; what an interrupted one has left is dropped."""

    def forward(self, number: int, batch: Microbatch, received: Sequence[Tensor]) -> list[Tensor]:
        """Computes batch `number`; returns what leaves, cut from the graph."""

    def backward(self, number: int, batch: Microbatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of what was received; those of weights are in the parameters."""


class Stages(ABC):
    """The stages that a side consists of: 0 is the head, the last one has the loss.

    model: has their parameters and buffers, by name; maybe others too.
    """

    model: nn.Module
    numbers: Sequence[int]

    @abstractmethod
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that they train."""

    @abstractmethod
    def written(self) -> list[str]:
        """The buffers that forward passes may change."""

    @abstractmethod
    def stage(self, number: int) -> StageAtWork:
        """A stage. Each party has its own."""

    @abstractmethod
    def arriving(self, number: int, examples: int) -> int:
        """How many of the values that a stage receives have a gradient."""

    @abstractmethod
    def without_gradient(self, stages: Mapping[int, StageAtWork], missed: int) -> Sequence[str]:
        """The parameters to which no way leads from values that got a gradient.

        stages: those of the party, behind their backward passes; they are not asked again. missed:
        which values got none, as bits: of those that the other side has told of.
        """

    @abstractmethod
    def passed_on(self, stage: StageAtWork, missed: int) -> int:
        """The same bits for the side before, which go back with the gradients."""


class Side:
    """The stages of one side of the cut, and an optimizer of what they train."""

    def __init__(self, stages: Stages, task: Task) -> None:
        self.stages = stages
        self.numbers = list(stages.numbers)
        self.parameters = stages.trained()
        self.moved = {
            name: nn.Parameter(parameter.data) for name, parameter in self.parameters.items()
        }
        """The same tensors, as the optimizer has them."""
        self._taken: Own | None = None
        """What its modules hold."""
        self._remembered: Own | None = None
        """Whose state and settings the optimizer has."""
        self.trimming = Trimming(task, self.moved.items())
        self.written = stages.written()
        self._task = task
        self._begin_optimizer()

    def _begin_optimizer(self) -> None:
        """Make the optimizer anew, of the weights as they are."""
        self.optimizer = self._made(self._task)
        self.rates = Rates(self.optimizer, self._task.lr_schedule)
        self.settings = Settings(self.optimizer, self.rates.schedule is not None)

    def _made(self, task: Task) -> Optimizer:
        """The task's optimizer, of the parameters of this side alone."""
        # It is made of all parameters, for a user's function may group them by their places.
        every = list(self.stages.model.parameters())
        optimizer = task.optimizer(every) if every else torch.optim.SGD([{"params": []}])
        moved = {id(one): self.moved[name] for name, one in self.parameters.items()}
        for group in optimizer.param_groups:
            group["params"] = [moved[id(one)] for one in group["params"] if id(one) in moved]
        # Some optimizers make their state when they are made.
        for parameter, kept in list(optimizer.state.items()):
            del optimizer.state[parameter]
            if id(parameter) in moved:
                optimizer.state[moved[id(parameter)]] = kept
        return optimizer

    # What it has learned

    def buffers(self) -> list[Tensor]:
        """Those that forward passes change."""
        return [self.stages.model.get_buffer(name) for name in self.written]

    def own(self) -> Own:
        """What it has learned, as copies."""
        return copied(self.keep())

    def take(self, own: Own) -> None:
        """These tensors are its weights and buffers from now on, and are changed in place."""
        if own is self._taken:
            return
        for parameters in (self.parameters, self.moved):
            for parameter, weight in zip(parameters.values(), own.weights, strict=True):
                parameter.data = weight
        for buffer, value in zip(self.buffers(), own.buffers, strict=True):
            buffer.data = value
        self._taken = own

    def keep(self) -> Own:
        """What `take` is given to come back to this: no copies."""
        moved = list(self.moved.values())
        own = Own(
            weights=tuple(one.data for one in self.parameters.values()),
            buffers=tuple(one.data for one in self.buffers()),
            optimizer=tuple(self.optimizer.state.get(one, {}) for one in moved),
            groups=self.settings.changed(),
            shared=shared_of(self.optimizer),
        )
        self._taken = self._remembered = own
        return own

    def check_kept(self, own: Own) -> None:
        """Raise RunFolderError where settings are not kept that steps of this optimizer change.

        Earlier versions of dure have kept none.
        """
        if own.groups is None and self.changes_settings:
            raise RunFolderError(
                f"the run was saved by an earlier version of dure, which did not keep the settings "
                f"that {type(self.optimizer).__name__} changes in its parameter groups: begin "
                f"the run anew"
            )

    @cached_property
    def changes_settings(self) -> bool:
        """Whether steps of the optimizer change settings, or what belongs to no parameter.

        True where this cannot be tried out.
        """
        if keeps_settings(self.optimizer):
            return False
        try:
            twin, _ = tried(self.optimizer, list(self.moved.values()), 1.0)
            return any(self.settings.changed(twin)) or bool(shared_of(twin))
        # An optimizer of the user's may want more than gradients.
        except Exception:
            return True

    def _remember(self) -> None:
        """Let the optimizer go on from what those remember whose tensors the side has."""
        own = self._taken
        if own is None or own is self._remembered:
            return
        self._remembered = own
        if own.groups == ():
            self._begin_optimizer()
            return
        self.check_kept(own)
        self.settings.put(own.groups or tuple({} for _ in self.settings.first))
        state: Any = self.optimizer.state
        state.clear()
        state.update(own.shared)
        for parameter, kept in zip(self.moved.values(), own.optimizer, strict=True):
            if kept:
                state[parameter] = kept

    # Learning

    def gradients(self) -> dict[str, Tensor | None]:
        """Those of the weights by name, which are taken away."""
        found = {name: one.grad for name, one in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        return found

    def update(self, gradients: Sequence[Tensor | None], step: int) -> None:
        """One step of the optimizer; step: that of the schedule, which unfreezes too."""
        self._remember()
        for parameter, gradient in zip(self.moved.values(), gradients, strict=True):
            parameter.grad = gradient
        self.trimming.drop(step)
        self.rates.at(step)
        self.optimizer.step()
        for parameter in self.moved.values():
            parameter.grad = None


class Party:
    """Someone who has a side: its own weights, and what its steps under way need.

    Several parties may share a side, as the clients of a simulation do. number: of the party, by
    which it draws.
    """

    def __init__(self, side: Side, own: Own, number: int) -> None:
        self.side = side
        self.number = number
        self._own = own
        self._left: tuple[Sequence[Tensor | None], int] | None = None
        """A step of the optimizer that is still to be made."""
        self._stages = {stage: side.stages.stage(stage) for stage in side.numbers}
        self._batches: dict[int, Microbatch] = {}
        self._gradients: dict[str, Tensor] = {}

    @property
    def own(self) -> Own:
        """What it has learned."""
        self.settle()
        return self._own

    @own.setter
    def own(self, own: Own) -> None:
        self._left = None
        self._own = own

    def forward(
        self, stage: int, step: int, batch: Microbatch, received: Sequence[Tensor]
    ) -> list[Tensor]:
        """What leaves a stage. step: from which draws follow."""
        self.side.take(self.own)
        one = self._stages[stage]
        one.begin(step)
        self._batches[stage] = batch
        with torch.enable_grad():
            return one.forward(self.number, batch, received)

    def loss(self, stage: int) -> tuple[float, float]:
        """What the last stage has added to the loss of its batch, and what that counts."""
        one = self._stages[stage]
        return one.losses[self.number], one.counts[self.number]

    def batch(self, stage: int) -> Microbatch:
        """With which a stage has gone forward, and not yet backward."""
        return self._batches[stage]

    def examples(self, stage: int) -> int:
        """Of that batch."""
        return self._batches[stage].examples

    def inputs(self, stage: int) -> Sequence[Any]:
        """The leaves of the inputs of that batch."""
        return self._batches[stage].inputs

    @property
    def under_way(self) -> bool:
        """Whether a batch has gone forward, and not yet backward."""
        return bool(self._batches)

    def missed(self, stage: int, examples: int) -> int:
        """Which of the values that the last stage has received got no gradient, as bits.

        To be asked behind its backward pass of so many examples.
        """
        count = self.side.stages.arriving(stage, examples)
        reached = self._stages[stage].reached
        return sum(1 << place for place in range(count) if place not in reached)

    def passed_on(self, stage: int, missed: int) -> int:
        """Which of the values that a stage has received got none, where these that left got none.

        To be asked behind its backward pass.
        """
        return self.side.stages.passed_on(self._stages[stage], missed)

    def backward(self, stage: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of what the stage has received; those of weights are kept here."""
        self.side.take(self.own)
        found = self._stages[stage].backward(self.number, self._batches.pop(stage), gradients)
        # Others compute with the same modules before this party's next stage does.
        for name, gradient in self.side.gradients().items():
            if gradient is not None:
                before = self._gradients.get(name)
                self._gradients[name] = gradient if before is None else before + gradient
        return found

    def gradients(self, missed: int) -> tuple[Tensor | None, ...]:
        """Those of the weights, since this was asked last; None of one that got none.

        missed: which values got no gradient, as bits, by what the other side has told: no way leads
        from the loss to the weights before them alone.
        """
        found = self._gradients
        self._gradients = {}
        for name in self.side.stages.without_gradient(self._stages, missed):
            found.pop(name, None)
        return tuple(found.get(name) for name in self.side.parameters)

    def drop(self) -> None:
        """What is under way will not be gone on with."""
        self._batches.clear()
        self._gradients.clear()

    def update(self, gradients: Sequence[Tensor | None], step: int) -> None:
        """One step of the optimizer, at a step of the schedule."""
        self.side.take(self.own)
        self.side.update(gradients, step)
        self._own = self.side.keep()

    @property
    def unsettled(self) -> Sequence[Tensor | None]:
        """The gradients of the step that was left."""
        return () if self._left is None else self._left[0]

    def leave(self, gradients: Sequence[Tensor | None], step: int) -> None:
        """Leaves an `update` for `settle`, or for when somebody asks what it has learned."""
        self.settle()
        self._left = gradients, step

    def settle(self) -> None:
        """Makes the step that was left."""
        left = self._left
        self._left = None
        if left is not None:
            self.update(*left)


def copied(own: Own) -> Own:
    """The same in tensors of its own."""
    return Own(
        weights=tuple(one.clone() for one in own.weights),
        buffers=tuple(one.clone() for one in own.buffers),
        optimizer=tuple(map(_copied, own.optimizer)),
        groups=None if own.groups is None else tuple(map(_copied, own.groups)),
        shared=_copied(own.shared),
    )


def fresh(own: Own) -> Own:
    """Return the same weights with an optimizer that begins anew."""
    return Own(own.weights, own.buffers, tuple({} for _ in own.optimizer), ())


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copied_value(value) for name, value in values.items()}


def weighed(losses: CountedLoss) -> Loss:
    """The mean loss of a batch, times its share in that of the joint batch."""

    def loss(outputs: Any, targets: Any, examples: int, share: Share) -> Computed:
        found = losses.mean(outputs, targets, examples)
        if share.counted is None or share.counted == share.of:
            return found
        return Computed(found.loss * (share.counted / share.of), found.counted)

    return loss
