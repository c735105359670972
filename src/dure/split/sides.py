"""Side of the cut: the stages of the model at a party, and their optimizer.

    forward    received values             ->  output values
    backward   gradients of the output     ->  gradients of the received values, and of the weights
    update     a step of the task's optimizer on the weights of the side

The state of a side is an `SideState`. If many clients live in one process, they share the modules
of one model: before a client computes, its own tensors replace the tensors of the modules (`take`),
which moves no data. The optimizer updates the tensors through parameters of its own, so that
autograd treats the tensors that a client's graph has saved as unchanged, whichever client computes
in between. A client's optimizer state and changed settings are put into the optimizer before the
client's step.

There are two kinds of stages: pieces of a traced model (`dure.split.cutting`), and separate modules
(`dure.split.separate_models`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dure.contracts.lr_schedule import ScheduledRates
from dure.contracts.task import Task
from dure.errors import RunFolderError
from dure.machine.devices import device_of_model, is_cpu
from dure.parallel.pipeline.stage import Microbatch
from dure.split.messages import SideState
from dure.split.optimizer_settings import (
    ChangedSettings,
    copied_value,
    keeps_settings,
    shared_of,
    stepped_copy,
)
from dure.tasks.gradient_transforms import GradientTransforms
from dure.tasks.loss_shares import ComputedLoss, CountedLoss, LossShare
from dure.tensors.optimizer_state import entries_on

StageLoss = Callable[[Any, Any, int, LossShare], ComputedLoss]
"""loss(outputs, targets, examples, share), as for the last stage of a pipeline."""


class PartyStage(Protocol):
    """Stage of a party, with the graphs for its backward passes.

    losses, counts: loss of a batch at the last stage, and its count, by the batch's number.
    reached: indices of the received differentiable values that got a gradient.
    """

    losses: dict[int, float]
    counts: dict[int, float]
    reached: set[int]

    def begin(self, step: int) -> None:
        """Begin a step; discard the graphs of an interrupted step."""

    def forward(self, number: int, batch: Microbatch, received: Sequence[Tensor]) -> list[Tensor]:
        """Compute batch `number`; return the output, detached from the graph."""

    def backward(self, number: int, batch: Microbatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the received values; parameters accumulate their own."""


class Stages(ABC):
    """Stages of a side: 0 is the head, the last stage has the loss.

    model: contains their parameters and buffers, and possibly others.
    """

    model: nn.Module
    numbers: Sequence[int]

    @abstractmethod
    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the stages train, by name."""

    @abstractmethod
    def written(self) -> list[str]:
        """Return the names of the buffers that forward passes may change."""

    @abstractmethod
    def stage(self, number: int) -> PartyStage:
        """Return a new stage, as each party has its own."""

    @abstractmethod
    def arriving(self, number: int, examples: int) -> int:
        """Return the number of values with a gradient that a stage receives."""

    @abstractmethod
    def without_gradient(self, stages: Mapping[int, PartyStage], missed: int) -> Sequence[str]:
        """Return the parameters that no value with a gradient depends on.

        stages: of the party, after their backward passes; they are released. missed: bit mask of
        the values without a gradient, from the other side.
        """

    @abstractmethod
    def passed_on(self, stage: PartyStage, missed: int) -> int:
        """Return the bit mask for the side before, to send with the gradients."""


class Side:
    """Stages of a side of the cut, and the optimizer of their parameters."""

    def __init__(self, stages: Stages, task: Task) -> None:
        self.stages = stages
        self.numbers = list(stages.numbers)
        self.parameters = stages.trained()
        self.moved = {
            name: nn.Parameter(parameter.data) for name, parameter in self.parameters.items()
        }
        """Parameters of the optimizer, which share the tensors of `parameters`."""
        self._taken: SideState | None = None
        """State whose tensors the modules have."""
        self._remembered: SideState | None = None
        """State whose optimizer state and settings the optimizer has."""
        self.trimming = GradientTransforms(task, self.moved.items())
        self.written = stages.written()
        self._away = not is_cpu(device_of_model(stages.model))
        """Whether the tensors of the side are on an accelerator."""
        self._task = task
        self._begin_optimizer()

    def _begin_optimizer(self) -> None:
        """Make a new optimizer of the current weights."""
        self.optimizer = self._made(self._task)
        self.rates = ScheduledRates(self.optimizer, self._task.lr_schedule)
        self.settings = ChangedSettings(self.optimizer, self.rates.schedule is not None)

    def _made(self, task: Task) -> Optimizer:
        """Return the task's optimizer, restricted to the parameters of this side."""
        # Made of all parameters, as a user's function may group parameters by their positions.
        every = list(self.stages.model.parameters())
        optimizer = task.optimizer(every) if every else torch.optim.SGD([{"params": []}])
        moved = {id(one): self.moved[name] for name, one in self.parameters.items()}
        for group in optimizer.param_groups:
            group["params"] = [moved[id(one)] for one in group["params"] if id(one) in moved]
        # Some optimizers, such as Adagrad, create their state in the constructor.
        for parameter, kept in list(optimizer.state.items()):
            del optimizer.state[parameter]
            if id(parameter) in moved:
                optimizer.state[moved[id(parameter)]] = kept
        return optimizer

    # State

    def buffers(self) -> list[Tensor]:
        """Return the buffers that forward passes change."""
        return [self.stages.model.get_buffer(name) for name in self.written]

    def own(self) -> SideState:
        """Return a copy of the state."""
        return copied(self.keep())

    def take(self, own: SideState) -> None:
        """Use these tensors as weights and buffers from now on; they are changed in place."""
        if own is self._taken:
            return
        for parameters in (self.parameters, self.moved):
            for parameter, weight in zip(parameters.values(), own.weights, strict=True):
                parameter.data = weight
        for buffer, value in zip(self.buffers(), own.buffers, strict=True):
            buffer.data = value
        self._taken = own

    def placed(self, own: SideState) -> SideState:
        """Return a state on the devices of this side's tensors; `own` itself if it is there.

        A state from a file or a message is in the CPU's memory.
        """
        if not self._away:
            return own
        devices = [one.device for one in self.parameters.values()]
        group_of = {
            id(one): group for group in self.optimizer.param_groups for one in group["params"]
        }
        groups = [group_of.get(id(one), {}) for one in self.moved.values()]
        kept = zip(own.optimizer, devices, groups, strict=True)
        found = SideState(
            weights=_on(own.weights, devices),
            buffers=_on(own.buffers, [one.device for one in self.buffers()]),
            optimizer=tuple(entries_on(*each) for each in kept),
            groups=own.groups,
            shared=own.shared,
        )
        pairs = zip(tree_leaves(_tree(own)), tree_leaves(_tree(found)), strict=True)
        return own if all(one is other for one, other in pairs) else found

    def keep(self) -> SideState:
        """Return the current state without copies, for a later `take`."""
        moved = list(self.moved.values())
        own = SideState(
            weights=tuple(one.data for one in self.parameters.values()),
            buffers=tuple(one.data for one in self.buffers()),
            optimizer=tuple(self.optimizer.state.get(one, {}) for one in moved),
            groups=self.settings.changed(),
            shared=shared_of(self.optimizer),
        )
        self._taken = self._remembered = own
        return own

    def check_kept(self, own: SideState) -> None:
        """Raise RunFolderError if `own` lacks the settings that steps of this optimizer change.

        Earlier versions of dure saved no settings.
        """
        if own.groups is None and self.changes_settings:
            raise RunFolderError(
                "the run was saved by an earlier version of dure, without the settings that "
                f"{type(self.optimizer).__name__} changes in its parameter groups: start the run "
                "again"
            )

    @cached_property
    def changes_settings(self) -> bool:
        """Whether steps of the optimizer change settings, or state that belongs to no parameter.

        True if a trial of the optimizer fails.
        """
        if keeps_settings(self.optimizer):
            return False
        try:
            twin, _ = stepped_copy(self.optimizer, list(self.moved.values()), 1.0)
            return any(self.settings.changed(twin)) or bool(shared_of(twin))
        # A user's optimizer may need more than gradients.
        except Exception:
            return True

    def _remember(self) -> None:
        """Load the optimizer state of the party whose tensors the modules have."""
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

    # Training

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of the weights by name, and clear them."""
        found = {name: one.grad for name, one in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        return found

    def update(self, gradients: Sequence[Tensor | None], step: int) -> None:
        """Step the optimizer; step: of the learning-rate schedule and of unfreezing."""
        self._remember()
        for parameter, gradient in zip(self.moved.values(), gradients, strict=True):
            parameter.grad = gradient
        self.trimming.drop(step)
        self.rates.at(step)
        self.optimizer.step()
        for parameter in self.moved.values():
            parameter.grad = None


class SideRunner:
    """A party with a side: its own weights, and the state of its unfinished steps.

    Several parties may share a side, as the clients of a simulation do. number: of the party, used
    in the seeds of its random numbers.
    """

    def __init__(self, side: Side, own: SideState, number: int) -> None:
        self.side = side
        self.number = number
        self._own = side.placed(own)
        self._left: tuple[Sequence[Tensor | None], int] | None = None
        """Gradients and step of a pending update."""
        self._stages = {stage: side.stages.stage(stage) for stage in side.numbers}
        self._batches: dict[int, Microbatch] = {}
        self._gradients: dict[str, Tensor] = {}

    @property
    def own(self) -> SideState:
        """State of the party, after the pending update."""
        self.settle()
        return self._own

    @own.setter
    def own(self, own: SideState) -> None:
        self._left = None
        self._own = self.side.placed(own)

    def forward(
        self, stage: int, step: int, batch: Microbatch, received: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the output of a stage. step: used in the seeds of random numbers."""
        self.side.take(self.own)
        one = self._stages[stage]
        one.begin(step)
        self._batches[stage] = batch
        with torch.enable_grad():
            return one.forward(self.number, batch, received)

    def loss(self, stage: int) -> tuple[float, float]:
        """Return (loss, count) of the last stage's batch."""
        one = self._stages[stage]
        return one.losses[self.number], one.counts[self.number]

    def batch(self, stage: int) -> Microbatch:
        """Return the batch of a stage between its forward and backward pass."""
        return self._batches[stage]

    def examples(self, stage: int) -> int:
        """Return the number of examples of that batch."""
        return self._batches[stage].examples

    def inputs(self, stage: int) -> Sequence[Any]:
        """Return the leaves of the inputs of that batch."""
        return self._batches[stage].inputs

    @property
    def under_way(self) -> bool:
        """Whether a batch is between its forward and backward pass."""
        return bool(self._batches)

    def missed(self, stage: int, examples: int) -> int:
        """Return the bit mask of the last stage's received values without a gradient.

        Call this after its backward pass of `examples` examples.
        """
        count = self.side.stages.arriving(stage, examples)
        reached = self._stages[stage].reached
        return sum(1 << place for place in range(count) if place not in reached)

    def passed_on(self, stage: int, missed: int) -> int:
        """Return the bit mask of a stage's received values without a gradient.

        missed: bit mask of its output values without a gradient. Call this after its backward pass.
        """
        return self.side.stages.passed_on(self._stages[stage], missed)

    def backward(self, stage: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the received values; accumulate the gradients of weights."""
        self.side.take(self.own)
        found = self._stages[stage].backward(self.number, self._batches.pop(stage), gradients)
        # Move the gradients out of the shared modules before another party computes with them.
        for name, gradient in self.side.gradients().items():
            if gradient is not None:
                before = self._gradients.get(name)
                self._gradients[name] = gradient if before is None else before + gradient
        return found

    def gradients(self, missed: int) -> tuple[Tensor | None, ...]:
        """Return the gradients accumulated since the last call; None for a weight without any.

        missed: bit mask of the values without a gradient, from the other side: weights on which
        only these values depend get None.
        """
        found = self._gradients
        self._gradients = {}
        for name in self.side.stages.without_gradient(self._stages, missed):
            found.pop(name, None)
        return tuple(found.get(name) for name in self.side.parameters)

    def drop(self) -> None:
        """Discard unfinished batches and their gradients."""
        self._batches.clear()
        self._gradients.clear()

    def update(self, gradients: Sequence[Tensor | None], step: int) -> None:
        """Step the optimizer, at a step of the schedule."""
        self.side.take(self.own)
        self.side.update(gradients, step)
        self._own = self.side.keep()

    @property
    def unsettled(self) -> Sequence[Tensor | None]:
        """Gradients of the pending update."""
        return () if self._left is None else self._left[0]

    def leave(self, gradients: Sequence[Tensor | None], step: int) -> None:
        """Defer an `update` until `settle`, or until the state is read."""
        self.settle()
        self._left = gradients, step

    def settle(self) -> None:
        """Make the pending update."""
        left = self._left
        self._left = None
        if left is not None:
            self.update(*left)


def copied(own: SideState) -> SideState:
    """Return a copy with new tensors."""
    return SideState(
        weights=tuple(one.clone() for one in own.weights),
        buffers=tuple(one.clone() for one in own.buffers),
        optimizer=tuple(map(_copied, own.optimizer)),
        groups=None if own.groups is None else tuple(map(_copied, own.groups)),
        shared=_copied(own.shared),
    )


def without_optimizer_state(own: SideState) -> SideState:
    """Return the same weights with an empty optimizer state."""
    return SideState(own.weights, own.buffers, tuple({} for _ in own.optimizer), ())


def _on(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
    return tuple(one.to(device) for one, device in zip(tensors, devices, strict=True))


def _tree(own: SideState) -> tuple[Any, ...]:
    """Return the tensors that have a device of their own."""
    return own.weights, own.buffers, [dict(one) for one in own.optimizer]


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copied_value(value) for name, value in values.items()}


def weighted_loss(losses: CountedLoss) -> StageLoss:
    """Return the mean loss of a batch, times its share of the joint batch."""

    def loss(outputs: Any, targets: Any, examples: int, share: LossShare) -> ComputedLoss:
        found = losses.mean(outputs, targets, examples)
        if share.counted is None or share.counted == share.of:
            return found
        return ComputedLoss(found.loss * (share.counted / share.of), found.counted)

    return loss


def state_to_tree(own: SideState | None) -> dict[str, Any] | None:
    """Return the state as a tree; None stays None."""
    if own is None:
        return None
    return {
        "weights": [one.clone() for one in own.weights],
        "buffers": [one.clone() for one in own.buffers],
        "optimizer": [dict(one) for one in own.optimizer],
        "groups": None if own.groups is None else [dict(one) for one in own.groups],
        "shared": dict(own.shared),
    }


def state_from_tree(tree: Mapping[str, Any]) -> SideState:
    """Return the state of a tree, also of a tree from an earlier version of dure."""
    groups = tree.get("groups")
    return SideState(
        weights=tuple(one.clone() for one in tree["weights"]),
        buffers=tuple(one.clone() for one in tree["buffers"]),
        optimizer=tuple(dict(one) for one in tree["optimizer"]),
        groups=None if groups is None else tuple(dict(one) for one in groups),
        shared=dict(tree.get("shared", {})),
    )
