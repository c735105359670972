"""Flower: its simulation engine, that is Ray with one actor a core, and its FedAvg strategy.

What a client does is its user's code: here the lean loop, kept by the actor between clients. The
weights travel as one flat array.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from federation import Federation, asked, ended, finished
from lean import Worker

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class GivenCohorts(FedAvg):
    """Flower draws the nodes, and each node of a round is told which client it is."""

    def __init__(self, federation: Federation) -> None:
        clients = federation.clients
        cohort = len(federation.cohorts[0])
        # It begins while nodes are still registered: with fewer it would draw fewer.
        least = {"min_train_nodes": cohort, "min_available_nodes": clients}
        super().__init__(fraction_train=cohort / clients, fraction_evaluate=0, **least)
        self.cohorts = federation.cohorts

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message, client in zip(messages, self.cohorts[server_round - 1], strict=True):
            message.content = RecordDict(
                {"arrays": arrays, "config": ConfigRecord({"client": client})}
            )
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        result = super().aggregate_train(server_round, replies)
        finished(server_round)
        return result


def client_app(file: Path) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from with_flower import worker_of  # by reference, so that what it keeps stays in the actor

        worker = worker_of(file)
        client = message.content["config"]["client"]
        server = torch.from_numpy(message.content["arrays"].to_numpy_ndarrays()[0])
        weights = worker.train(server, client).numpy()
        (size,) = worker.federation.sizes([client])
        metrics = MetricRecord({"num-examples": size})
        return Message(
            RecordDict({"arrays": ArrayRecord([weights]), "metrics": metrics}), reply_to=message
        )

    return app


@functools.cache
def worker_of(file: Path) -> Worker:
    torch.set_num_threads(1)
    return Worker(Federation(file))


def main() -> None:
    file = asked().file.absolute()
    federation = Federation(file)
    worker = Worker(federation)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        initial = ArrayRecord([worker.weights.numpy()])
        result = GivenCohorts(federation).start(grid, initial, num_rounds=federation.rounds)
        worker.weights.copy_(torch.from_numpy(result.arrays.to_numpy_ndarrays()[0]))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app(file), federation.clients, backend_config=resources)
    ended(federation.accuracy(worker.model), "flwr", "ray", "torch")


if __name__ == "__main__":
    main()
