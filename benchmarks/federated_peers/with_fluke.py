"""fluke: its FedAvg with clients that keep nothing between rounds, and its own FastDataLoader.

It imports torchvision, for models that are not used here; the package index has it for CUDA only,
and beside a CPU build of torch it does not load. A stand-in takes its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import torch

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    sys.modules.update(
        dict.fromkeys(("torchvision", "torchvision.datasets", "torchvision.models"), MagicMock())
    )

from federation import BATCH, LR, Federation, asked, ended, finished
from fluke import FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from torch import nn


class GivenCohorts(Server):
    cohorts: Iterator[list[int]]

    def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
        return [self.clients[client] for client in next(self.cohorts)]


class Clock(FederationObserver):
    def end_round(self, round: int) -> None:
        finished(round)


def loader(federation: Federation, client: int) -> FastDataLoader:
    own = federation.examples(client)
    inputs, targets = federation.tensors
    options: dict[str, Any] = {
        "num_labels": 10,
        "batch_size": BATCH,
        "shuffle": True,
        "skip_singleton": False,
    }
    return FastDataLoader(inputs[own], targets[own], **options)


def main() -> None:
    options = asked()
    torch.set_num_threads(options.threads)
    FlukeENV().set_device("cpu")
    federation = Federation(options.file)
    sgd = OptimizerConfigurator({"name": torch.optim.SGD, "lr": LR})
    loss = nn.CrossEntropyLoss()
    clients = [
        Client(
            client, loader(federation, client), None, sgd, loss, local_epochs=1, persistency=False
        )
        for client in range(federation.clients)
    ]
    server = GivenCohorts(federation.torch_model(), None, clients, weighted=True)
    server.cohorts = iter(federation.cohorts)
    algorithm = FedAVG(federation.clients, None, {}, clients=clients, server=server)
    algorithm.set_callbacks(Clock())
    algorithm.run(federation.rounds, len(federation.cohorts[0]) / federation.clients)
    ended(federation.accuracy(server.model), "fluke-fl", "torch")


if __name__ == "__main__":
    main()
