"""Personalisation: train the newest global model further on a client's own data, offline.

No server is needed: the last global model that the client fetched is in the client's folder.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.task import Task
from dure.data.batches import batches_per_epoch, check_batch_size
from dure.deploy.client.state import ClientState
from dure.errors import RunFolderError
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import generator
from dure.tasks.batch_norm import needs_two
from dure.tasks.evaluation import evaluate
from dure.tasks.gradient_transforms import clip, forward_context
from dure.tasks.loss_scaling import RepeatedPasses
from dure.tensors.elements import all_finite
from dure.tensors.flat import trainable_parameters
from dure.tensors.frozen import frozen_of, load_frozen
from dure.wire.layout import is_extra


class PersonalisationResult(NamedTuple):
    """A personalised model.

    round: round of the global model. before, after: metrics of the global and of the personalised
    model on the task's test data; empty without test data.
    """

    round: int
    model: nn.Module
    before: dict[str, float]
    after: dict[str, float]


def personalise(
    state: str | Path, task: Task, *, epochs: int = 1, batch_size: int = 10, seed: int = 0
) -> PersonalisationResult:
    """Train the newest global model on the task's data, and store it in the client's folder.

    Args:
        state: folder of a client (`dure.join(state=...)`).
        task: task with the data that the client has now.
        epochs: passes over the data.
        batch_size: examples of a step.
        seed: seed of the order of examples, and of dropout.

    Raises:
        RunFolderError: if no global model was fetched yet.
        ValueError: for another task, for a task without training data, and if training diverges.
    """
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}, but it has to be 1 or more")
    check_batch_size(batch_size)
    if not len(task.train):
        raise ValueError("the task has no training data, which a personal model needs")
    with ClientState(Path(state)) as kept, deferred_compiler():
        round, model = _newest(kept, task)
        before = _measured(task, model)
        _train(task, model, epochs, batch_size, seed)
        kept.keep_personal({name: one.contiguous() for name, one in _state(model).items()})
        return PersonalisationResult(round, model, before, _measured(task, model))


def personal_model(state: str | Path, task: Task) -> nn.Module:
    """Return the client's personalised model for predictions; else the newest global model.

    state: folder of a client (`dure.join(state=...)`). task: the task of the federation.
    Raises RunFolderError if the folder has neither.
    """
    with ClientState(Path(state)) as kept:
        own = kept.personal()
        _, model = _newest(kept, task)
        if own is not None:
            _load(model, own)
        return model.eval()


def _newest(kept: ClientState, task: Task) -> tuple[int, nn.Module]:
    """Return the round and the newest global model."""
    found = kept.model()
    if found is None:
        raise RunFolderError(
            f"{kept.folder} has no model yet: join the federation once with --state {kept.folder}"
        )
    model = seeded_model(task, 0)
    frozen = kept.frozen()
    # Frozen weights were drawn under the run's seed, and no fetched model contains them.
    if frozen_of(model) and not frozen:
        raise RunFolderError(
            f"{kept.folder} lacks the weights that are not trained: join the federation again "
            f"with --state {kept.folder}"
        )
    load_frozen(model, frozen)
    _load(model, {name: one for name, one in found[1].items() if not is_extra(name)})
    return found[0], model


@torch.no_grad()
def _load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if name not in there or there[name].shape != tensor.shape:
            raise ValueError(
                f"the fetched global model has {name}, which the task's model does not have"
            )
        there[name].copy_(tensor)


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: one.detach() for name, one in named.items()}


def _train(task: Task, model: nn.Module, epochs: int, batch_size: int, seed: int) -> None:
    device = device_of_model(model)
    task = task.on(device)
    train, _ = examples_for(task)
    size = min(batch_size, len(train))
    # A single leftover example joins the batch before, if the model cannot train on one example.
    batches = batches_per_epoch(len(train), size, needs_two(model, train))
    optimizer = task.optimizer(trainable_parameters(model))
    passes = RepeatedPasses(task, model, device)

    def compute(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        with forward_context(task, device):
            loss = task.loss(model(inputs), targets)
        passes.backward(loss[0] / loss[1] if isinstance(loss, tuple) else loss)

    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=generator(seed, "personal", epoch))
        for step in range(batches):
            end = len(train) if step == batches - 1 else (step + 1) * size
            inputs, targets = to_device(train.batch(order[step * size : end]), device)
            passes.run(
                partial(compute, inputs, targets),
                lambda _: [one.grad for one in model.parameters()],
            )
            if task.clip_norm is not None:
                clip(model.parameters(), task.clip_norm)
            optimizer.step()
    if not all(all_finite(one.detach()) for one in trainable_parameters(model)):
        raise ValueError(
            "the training has diverged: no model is saved; choose a smaller learning rate"
        )


def _measured(task: Task, model: nn.Module) -> dict[str, float]:
    _, test = examples_for(task)
    return evaluate(task.on(device_of_model(model)), model, test, Group(), 0)
