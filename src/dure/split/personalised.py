"""Evaluation of personalised models, each on examples that its client holds out.

    personal_<metric>    of client k's head and the common tail, on the examples that client k does
                         not train on; over the examples of all clients together

Metrics are defined as on the test data. With more than a thousand clients a fixed sample of a
thousand is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import device_of_model, to_device
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode

MOST = 1_000
"""Maximum number of measured clients."""


def names(task: Task) -> list[str]:
    """Return the names of the metrics."""
    return [f"personal_{name}" for name in ("loss", *task.measures)]


@torch.no_grad()
def measure(
    task: Task,
    model: nn.Module,
    examples: Examples,
    held_out: Sequence[Tensor],
    load: Callable[[int], None],
    seed: int,
) -> dict[str, float]:
    """Return the metrics by name; empty if no client holds out examples.

    Args:
        task: the task.
        model: the model to load weights into.
        examples: all examples.
        held_out: indices of each client's held-out examples.
        load: puts the weights of a client's own model into `model`.
        seed: seed of the sample of clients.
    """
    chosen = sorted(Permutation(len(held_out), derive(seed, "measured clients")).first(MOST))
    clients = [client for client in chosen if len(held_out[client])]
    count = sum(len(held_out[client]) for client in clients)
    if not count:
        return {}
    # A single measurement over all clients, so that each example has the same weight.
    measurement = Measurement(task, examples=count, share=count)
    device = device_of_model(model)
    with in_mode(model, training=False):
        for client in clients:
            load(client)
            for indices in torch.split(held_out[client], task.eval_batch_size):
                inputs, targets = to_device(examples.batch(indices), device)
                measurement.add(model(inputs), targets, len(indices))
    return {f"personal_{name}": value for name, value in measurement.values(Group()).items()}
