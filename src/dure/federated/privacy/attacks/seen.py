"""What an attacker has who reads the server: the model it sent, and what came back.

    one update         delta = w' - w of a client; after one step of SGD it is -lr · gradient, with
                       what the decay of weights adds, which the server can take off again
    a sum of m         sum of n_k delta_k / sum of n_k: after one step of all data that is the
                       update of one client who has the data of all

Secure aggregation lets the server have sums alone; noise and compression change what it has before
it comes (`changes`). The attacker also knows what it has asked for: the loss, the learning rate,
the number of steps and of examples. It never sees an example.
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
from dure.federated.privacy.attacks.recording import Recorded
from dure.tensors.flat import FlatParameters, trained_of, views_of

Names = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
"""What lies in flat tensors, as `FlatParameters.names` has it."""


class Model:
    """The task's model as a function of its weights, in the mode of training, without dropout.

    model: of the task, under the run's seed, so that what it has frozen is the run's; it is
    changed. Weights and buffers are given at each call.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.names: Names = FlatParameters(model).names
        self.buffer_names = [name for name, _ in model.named_buffers()]
        self.module = model.train()
        for module in model.modules():
            # Which units were left out is the client's own draw: the attacker takes all of them.
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        self.loss = loss

    def named(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Flat tensors as tensors by the names of parameters.

        Raises ValueError where they are of another model.
        """
        found: dict[str, Tensor] = {}
        sizes = [sum(_count(shape) for _, shape in group) for group in self.names]
        if [one.numel() for one in flat] != sizes:
            raise ValueError(
                f"the updates have {sum(one.numel() for one in flat):,} numbers, and the task's "
                f"model trains {sum(sizes):,}: they are of another model"
            )
        for tensor, group in zip(flat, self.names, strict=True):
            like = [torch.empty(shape, device="meta") for _, shape in group]
            pieces = views_of(tensor, like)
            found.update({name: one for (name, _), one in zip(group, pieces, strict=True)})
        return found

    def outputs(self, state: Mapping[str, Tensor], inputs: Any) -> Any:
        """What the model gives. state: weights and buffers by name."""
        # Batch norm writes its running statistics: into copies.
        copies = {
            name: tensor.clone() if name in self.buffer_names else tensor
            for name, tensor in state.items()
        }
        return functional_call(self.module, copies, (inputs,))

    def loss_of(self, state: Mapping[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        """The mean loss, a scalar."""
        return mean_loss(self.loss, self.outputs(state, inputs), targets)

    def gradient(
        self, state: Mapping[str, Tensor], inputs: Any, targets: Any, again: bool = False
    ) -> dict[str, Tensor]:
        """The gradient of the mean loss by each weight. again: with a graph of its own."""
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
    """What `loss` gives, also where that is a pair (sum, count)."""
    value = loss(outputs, targets)
    if isinstance(value, tuple):
        return value[0] / value[1]
    return value


class Rate(NamedTuple):
    """A local step: w <- w - lr (gradient + weight_decay w)."""

    lr: float
    weight_decay: float = 0.0


def rate_of(task: Task, model: nn.Module, round: int, steps: int) -> Rate:
    """That of clients in a round, who make so many steps.

    Raises ValueError for local training of which the update is not the sum of its gradients.
    """
    optimizer = task.optimizer(trained_of(model))
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
    return Rate(lr, float(group["weight_decay"]))


@dataclass(frozen=True)
class Seen:
    """What the attacker has of one update, or of a sum of several.

    state: weights and buffers that were sent, by name. delta: what came back, by name. examples: of
    which it was made, those of all clients together. steps: of local training, each of batch_size
    examples. updates: m. buffers: as they came back, by name; none where none do.
    """

    state: Mapping[str, Tensor]
    delta: Mapping[str, Tensor]
    examples: int
    steps: int
    batch_size: int
    rate: Rate
    updates: int = 1
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """The mean gradient of the steps: -delta / (lr · steps). Of one step it is exact."""
        scale = -1 / (self.rate.lr * self.steps)
        decay = self.rate.weight_decay
        return {name: one * scale - decay * self.state[name] for name, one in self.delta.items()}

    @property
    def after(self) -> dict[str, Tensor]:
        """The client's model after training: what was sent, and its update."""
        moved = {name: self.state[name] + one for name, one in self.delta.items()}
        return {**self.state, **moved, **self.buffers}


def seen(model: Model, updates: Sequence[Recorded], rate: Rate) -> Seen:
    """What is seen of the sum of these updates, which are of one round.

    Raises ValueError for updates of several rounds.
    """
    first = updates[0]
    if len({one.about.round for one in updates}) > 1:
        raise ValueError("a sum is of updates of one round, and these are of several")
    total = sum(one.about.examples for one in updates)
    delta = [torch.zeros_like(tensor) for tensor in first.delta]
    for one in updates:
        for into, tensor in zip(delta, one.delta, strict=True):
            into.add_(tensor, alpha=one.about.examples / total)
    buffers = dict(zip(model.buffer_names, first.buffers, strict=True))
    return Seen(
        state={**model.named(first.weights), **buffers},
        delta=model.named(delta),
        # A step of a batch tells of the batch, and not of what its client has besides.
        examples=sum(_examples(one) for one in updates),
        steps=max(one.about.steps for one in updates),
        batch_size=max(_batch(one) for one in updates),
        rate=rate,
        updates=len(updates),
        buffers=dict(zip(model.buffer_names, _mean_buffers(updates, total), strict=False)),
    )


def _mean_buffers(updates: Sequence[Recorded], total: int) -> list[Tensor]:
    """As `delta`; those that count are the first client's. Empty where none came back."""
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


def _batch(update: Recorded) -> int:
    """Examples of a step."""
    about = update.about
    return min(about.batch_size or about.examples, about.examples)


def _examples(update: Recorded) -> int:
    """Different examples that a client's steps have processed: fewer than it has in few steps."""
    return min(update.about.examples, update.about.samples)


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
