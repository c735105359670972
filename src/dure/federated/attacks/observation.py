"""Observations of an attacker that reads the server: sent models and received updates.

    a single update    delta = w' - w of a client; after a single step of SGD it is -lr · gradient,
                       plus the weight decay, which the server can subtract
    a sum of m         sum of n_k delta_k / sum of n_k: after a single step on all data that is the
                       update of a client with the data of all

Secure aggregation gives the server only sums; noise and compression change the updates before the
server receives them (`changes`). The attacker also knows the requested loss, learning rate, number
of steps and number of examples. The attacker never sees an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dure.contracts.lr_schedule import factor_at
from dure.contracts.task import Loss, Task
from dure.federated.attacks.recording import RecordedUpdate
from dure.tensors.flat import FlatParameters, trainable_parameters, views_of

Names = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
"""Names and shapes of the parameters in flat tensors, as in `FlatParameters.names`."""


class AttackedModel:
    """The task's model as a function of its weights, in training mode without dropout.

    `model` is the task's model under the run's seed, so that frozen parameters equal those of the
    run; the constructor changes its mode. Each call takes weights and buffers.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.names: Names = FlatParameters(model).names
        self.buffer_names = [name for name, _ in model.named_buffers()]
        self.module = model.train()
        for module in model.modules():
            # The client's dropout mask is random and unknown to the attacker, who uses all units.
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        self.loss = loss

    def named(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views of flat tensors by parameter name.

        Raises ValueError for tensors of another model.
        """
        found: dict[str, Tensor] = {}
        sizes = [sum(_count(shape) for _, shape in group) for group in self.names]
        if [one.numel() for one in flat] != sizes:
            raise ValueError(
                f"the updates have {sum(one.numel() for one in flat):,} numbers, but the task's "
                f"model trains {sum(sizes):,}: they belong to another model"
            )
        for tensor, group in zip(flat, self.names, strict=True):
            like = [torch.empty(shape, device="meta") for _, shape in group]
            pieces = views_of(tensor, like)
            found.update({name: one for (name, _), one in zip(group, pieces, strict=True)})
        return found

    def outputs(self, state: Mapping[str, Tensor], inputs: Any) -> Any:
        """Return the model's outputs. `state` has weights and buffers by name."""
        # Batch norm writes its running statistics, so buffers are copied.
        copies = {
            name: tensor.clone() if name in self.buffer_names else tensor
            for name, tensor in state.items()
        }
        return functional_call(self.module, copies, (inputs,))

    def loss_of(self, state: Mapping[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        """Return the mean loss, a scalar."""
        return mean_loss(self.loss, self.outputs(state, inputs), targets)

    def gradient(
        self, state: Mapping[str, Tensor], inputs: Any, targets: Any, again: bool = False
    ) -> dict[str, Tensor]:
        """Return the gradient of the mean loss by weight name. `again` keeps an autograd graph."""
        weights = {name for group in self.names for name, _ in group}
        own = {
            name: tensor if tensor.requires_grad else tensor.detach().requires_grad_()
            for name, tensor in state.items()
            if name in weights
        }
        loss = self.loss_of({**state, **own}, inputs, targets)
        found = torch.autograd.grad(loss, list(own.values()), create_graph=again, allow_unused=True)
        return {
            name: torch.zeros_like(own[name]) if one is None else one
            for name, one in zip(own, found, strict=True)
        }


def mean_loss(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Return the loss as a mean; a pair (sum, count) is divided."""
    value = loss(outputs, targets)
    if isinstance(value, tuple):
        return value[0] / value[1]
    return value


class StepRate(NamedTuple):
    """Constants of a local step: w <- w - lr (gradient + weight_decay w)."""

    lr: float
    weight_decay: float = 0.0


def step_rate_of(task: Task, model: nn.Module, round: int, steps: int) -> StepRate:
    """Return the learning rate and weight decay of clients that make `steps` steps in a round.

    Raises ValueError for local training whose update is not a sum of gradients.
    """
    optimizer = task.optimizer(trainable_parameters(model))
    groups = optimizer.param_groups
    if type(optimizer) is not torch.optim.SGD or len(groups) > 1:
        raise ValueError(
            f"clients train by {type(optimizer).__name__}, of which an update is no sum of "
            f"gradients that could be inverted"
        )
    group = groups[0]
    if group["nesterov"] or group["dampening"] or group["maximize"]:
        raise ValueError("clients train by SGD with nesterov, dampening or maximize")
    if group["momentum"] and steps > 1:
        raise ValueError("clients make several steps with momentum, whose update is another sum")
    factor = 1.0 if task.lr_schedule is None else factor_at(task.lr_schedule, round)
    lr = float(group["lr"]) * factor
    if not lr > 0:
        raise ValueError(f"clients train with the learning rate {lr}, so updates tell nothing")
    return StepRate(lr, float(group["weight_decay"]))


@dataclass(frozen=True)
class ObservedUpdate:
    """Attacker's view of an update, or of a sum of updates.

    Args:
        state: sent weights and buffers, by name.
        delta: received change of the weights, by name.
        examples: examples behind the update, of all clients together.
        steps: steps of local training.
        batch_size: examples of each step.
        rate: learning rate and weight decay of the steps.
        updates: m, the number of summed updates.
        buffers: received buffers, by name; empty if clients send none.
    """

    state: Mapping[str, Tensor]
    delta: Mapping[str, Tensor]
    examples: int
    steps: int
    batch_size: int
    rate: StepRate
    updates: int = 1
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """Mean gradient of the steps: -delta / (lr · steps) - weight_decay w.

        Exact for a single step.
        """
        scale = -1 / (self.rate.lr * self.steps)
        decay = self.rate.weight_decay
        return {name: one * scale - decay * self.state[name] for name, one in self.delta.items()}

    @property
    def after(self) -> dict[str, Tensor]:
        """The client's model after training: the sent state plus the update."""
        moved = {name: self.state[name] + one for name, one in self.delta.items()}
        return {**self.state, **moved, **self.buffers}


def observed_sum(
    model: AttackedModel, updates: Sequence[RecordedUpdate], rate: StepRate
) -> ObservedUpdate:
    """Return the attacker's view of the sum of these updates of a round.

    Raises ValueError for updates of several rounds.
    """
    first = updates[0]
    if len({one.about.round for one in updates}) > 1:
        raise ValueError("a sum needs updates of one round, but these are from several")
    total = sum(one.about.examples for one in updates)
    delta = [torch.zeros_like(tensor) for tensor in first.delta]
    for one in updates:
        for into, tensor in zip(delta, one.delta, strict=True):
            into.add_(tensor, alpha=one.about.examples / total)
    buffers = dict(zip(model.buffer_names, first.buffers, strict=True))
    return ObservedUpdate(
        state={**model.named(first.weights), **buffers},
        delta=model.named(delta),
        # The update of a batch depends only on the batch, not on the client's other examples.
        examples=sum(_examples(one) for one in updates),
        steps=max(one.about.steps for one in updates),
        batch_size=max(_batch(one) for one in updates),
        rate=rate,
        updates=len(updates),
        buffers=dict(zip(model.buffer_names, _mean_buffers(updates, total), strict=False)),
    )


def _mean_buffers(updates: Sequence[RecordedUpdate], total: int) -> list[Tensor]:
    """Return the weighted mean of the received buffers; empty if clients send none.

    Integer buffers (counters) are the first client's.
    """
    first = updates[0].buffers_after
    weighed = [
        [tensor * (one.about.examples / total) for tensor in one.buffers_after] for one in updates
    ]
    return [
        torch.stack([each[place] for each in weighed]).sum(dim=0)
        if tensor.is_floating_point()
        else tensor
        for place, tensor in enumerate(first)
    ]


def _batch(update: RecordedUpdate) -> int:
    """Return the number of examples in a step."""
    about = update.about
    return min(about.batch_size or about.examples, about.examples)


def _examples(update: RecordedUpdate) -> int:
    """Return the number of a client's examples that its steps processed."""
    return min(update.about.examples, update.about.samples)


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
