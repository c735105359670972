"""dure: FedAvg in a simulated world. The clients are its natural ones, whose keys are the examples'
owners."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from federation import BATCH, LR, Federation, asked, ended, finished
from torch.nn import functional as F

import dure


def main() -> None:
    options = asked()
    federation = Federation(options.file)
    owners = np.repeat(np.arange(federation.clients), np.diff(federation.starts))
    train = dure.Examples(*federation.tensors, keys=[f"{owner:06}" for owner in owners])

    def sgd(parameters: Any) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=LR)

    task = dure.Task(federation.torch_model, F.cross_entropy, train, optimizer=sgd)
    strategy = dure.FedAvg(
        clients=federation.clients,
        fraction=len(federation.cohorts[0]) / federation.clients,
        local_epochs=1,
        batch_size=BATCH,
        partition=dure.NaturalKey(),
    )
    told: list[tuple[int, float]] = []
    run = dure.train(
        task,
        strategy,
        dure.Simulated(),
        dure.Stop(rounds=federation.rounds),
        evaluate_every=federation.rounds,
        on_progress=lambda event: told.append((event["step"], time.time())),
    )
    # It tells ten times a second at most; the first and the last round are told of in its history
    # at least.
    first = told[0][1]
    steps = run.history.steps
    finished(1, first + steps[0].seconds)
    for number, clock in told:
        if 1 < number < len(steps):
            finished(number, clock)
    finished(len(steps), max(told[-1][1], first + steps[-1].seconds))
    ended(federation.accuracy(run.model), "dure", "torch")


if __name__ == "__main__":
    main()
