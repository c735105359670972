"""Updates for tests of attacks: of a task's first model, of these examples, without a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import dure
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.federated.attacks.observation import AttackedModel, ObservedUpdate, StepRate
from dure.federated.attacks.recording import GroundTruth, RecordedUpdate, UpdateMetadata
from dure.tensors.flat import FlatParameters


def model_of(task: dure.Task, seed: int = 0) -> AttackedModel:
    return AttackedModel(seeded_model(task, seed), task.loss)


def seen_of(
    task: dure.Task, indices: Sequence[int], lr: float = 0.1
) -> tuple[AttackedModel, ObservedUpdate]:
    """What a server sees of one step of these examples."""
    model = model_of(task)
    state = dict(zip_state(task))
    inputs, targets = examples_for(task)[0].batch(torch.tensor(indices))
    gradient = model.gradient(state, inputs, targets)
    delta = {name: -lr * one for name, one in gradient.items()}
    return model, ObservedUpdate(state, delta, len(indices), 1, len(indices), StepRate(lr))


def zip_state(task: dure.Task) -> dict[str, Tensor]:
    made = seeded_model(task, 0)
    return {
        **{name: one.detach().clone() for name, one in made.named_parameters()},
        **{name: one.clone() for name, one in made.named_buffers()},
    }


def recorded_of(
    task: dure.Task, parts: Sequence[Sequence[int]], lr: float = 0.1
) -> list[RecordedUpdate]:
    """One step of all data of each of several clients, from the first model."""
    weights = FlatParameters(seeded_model(task, 0)).copy()
    made = []
    for client, part in enumerate(parts):
        model, seen = seen_of(task, part, lr)
        flat = [
            torch.cat([seen.delta[name].reshape(-1) for name, _ in group]) for group in model.names
        ]
        about = UpdateMetadata(client, client, 0, len(part), len(part), 1, 0.0)
        made.append(RecordedUpdate(about, weights, [], flat, GroundTruth([list(part)])))
    return made
