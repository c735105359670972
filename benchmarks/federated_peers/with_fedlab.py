"""FedLab: its standalone pipeline of a serial trainer and a synchronous server, with clients
weighted by examples.

The trainer iterates over whatever the data set gives it; a plain iterator is faster than a
DataLoader. FedLab imports torchvision, for data sets that are not used here; the package index has
it for CUDA only, and beside a CPU build of torch it does not load. A stand-in takes its place.
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
        dict.fromkeys(
            ("torchvision", "torchvision.datasets", "torchvision.transforms"), MagicMock()
        )
    )

from federation import BATCH, LR, Federation, asked, ended, finished
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool
from torch import Tensor


class Clients(FedDataset):
    def __init__(self, federation: Federation) -> None:
        self.federation = federation

    def get_dataloader(self, client: int, batch_size: int) -> Iterator[Any]:
        return self.federation.shuffled(client)


class Trainer(SGDSerialClientTrainer):
    def local_process(self, payload: list[Tensor], cohort: list[int]) -> None:
        super().local_process(payload, cohort)
        for pack, size in zip(self.cache, self.dataset.federation.sizes(cohort), strict=True):
            pack.append(torch.tensor(float(size)))


class Server(SyncServerHandler):
    cohorts: Iterator[list[int]]

    def sample_clients(self) -> list[int]:
        return next(self.cohorts)

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        weights, sizes = zip(*buffer, strict=True)
        SerializationTool.deserialize_model(
            self._model, Aggregators.fedavg_aggregate(list(weights), torch.stack(sizes))
        )


class Pipeline(StandalonePipeline):
    def evaluate(self) -> None:
        finished(self.handler.round)


def main() -> None:
    options = asked()
    torch.set_num_threads(options.threads)
    federation = Federation(options.file)
    model = federation.torch_model()
    trainer = Trainer(model, federation.clients)
    trainer.setup_dataset(Clients(federation))
    trainer.setup_optim(1, BATCH, LR)
    server = Server(model, federation.rounds, len(federation.cohorts[0]) / federation.clients)
    server.cohorts = iter(federation.cohorts)
    Pipeline(server, trainer).main()
    ended(federation.accuracy(server.model), "fedlab", "torch")


if __name__ == "__main__":
    main()
