"""Trainers as simulated clients: try a federation on one machine before it is deployed.

    dure.simulate(make_trainer, clients=4, stop=dure.Stop(rounds=5))

make_trainer(client) returns the trainer of a client, with its data. All clients begin with the
weights of the first. The trainers train one after another, exactly as patched trainers do on
machines of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.utils.data import ConcatDataset

from dure.contracts.stop import Stop
from dure.data.partition import NaturalKey
from dure.federated.algorithms.fed_avg import FedAvg
from dure.federated.strategy import Federated
from dure.record.run import Run
from dure.run.train import train
from dure.trainers.client_trainers import SimulatedTrainers
from dure.trainers.integration import check_between_rounds
from dure.trainers.libraries import integration_of
from dure.worlds.simulated import Simulated


def simulate(
    make_trainer: Callable[[int], Any],
    *,
    clients: int,
    strategy: Federated | None = None,
    stop: Stop | None = None,
    between_rounds: str = "reset",
    counts: str | None = None,
    world: Simulated | None = None,
    **options: Any,
) -> Run:
    """Train a federation whose clients are trainers of other libraries, in this process.

    Args:
        make_trainer: returns the trainer of a client, by its number from 0; for Lightning a tuple
            of the arguments, (trainer, module, data).
        clients: number of clients.
        strategy: a federated strategy; None is FedAvg. Its clients, partition and batch size are
            those of the trainers.
        stop: as in `dure.train`; None is three rounds.
        between_rounds: as in `dure.client.patch`.
        counts: as in `dure.client.patch`.
        world: conditions of the simulated clients; None is a federation without delays.
        options: other arguments of `dure.train`, such as out and seed.

    Returns:
        The run. The test data are those of the first trainer.

    Raises:
        ValueError: for trainers of unlike batch sizes, and what `dure.client.patch` raises.
    """
    if clients < 1:
        raise ValueError(f"clients is {clients}, but it has to be 1 or more")
    state = check_between_rounds(between_rounds)
    more = {} if counts is None else {"counts": counts}
    found = []
    for client in range(clients):
        made = make_trainer(client)
        trainer, *given = made if isinstance(made, tuple) else (made,)
        found.append(integration_of(trainer, **more).client(state, tuple(given), {}))
    trainers = [one.trainer for one in found]
    sizes = [one.examples for one in trainers]
    batch_size = trainers[0].batch_size
    unlike = next((one for one in trainers if one.batch_size != batch_size), None)
    if unlike is not None:
        raise ValueError(
            f"the trainers have steps of {batch_size} and of {unlike.batch_size} examples, and a "
            "federation has one size: make them equal"
        )
    task = found[0].task
    data: Any = ConcatDataset([one.task.train.dataset for one in found])
    keys = [client for client, size in enumerate(sizes) for _ in range(size)]
    task = dataclasses.replace(
        task,
        train=task.train.over(data, keys),
        trainer=SimulatedTrainers(trainers, [0, *accumulate(sizes[:-1])]),
    )
    chosen = dataclasses.replace(
        strategy or FedAvg(), clients=None, partition=NaturalKey(), batch_size=batch_size
    )
    return train(task, chosen, world or Simulated(), stop or Stop(rounds=3), **options)
