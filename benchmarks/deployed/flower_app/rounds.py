"""An app of Flower whose clients send back what they got, for benchmarks/deployed/flower.py.

The server's part is Flower's own FedAvg, over a model that is zeros in as many tensors as that of
server.py. It appends lines of JSON to the file `notes`: when each round was over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

TENSORS = 8

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 10, "loss": 1.0})
    answer = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content=answer, reply_to=message)


class Noted(FedAvg):
    """Writes down when a round was over."""

    notes: Path

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        answered = list(replies)
        made = super().aggregate_train(server_round, answered)
        failed = sum(one.has_error() for one in answered)
        line = {"at": time.time(), "answered": len(answered) - failed, "failed": failed}
        with self.notes.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return made


@server.main()
def main(grid: Grid, context: Context) -> None:
    said = context.run_config
    clients = int(said["clients"])
    floats = int(said["bytes"]) // 4
    model = [np.zeros(floats // TENSORS, np.float32) for _ in range(TENSORS - 1)]
    model.append(np.zeros(floats - sum(one.size for one in model), np.float32))
    strategy = Noted(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.notes = Path(str(said["notes"]))
    strategy.start(grid, ArrayRecord(model), num_rounds=int(said["rounds"]))
