"""pfl-research: its simulated backend and federated averaging on torch; several processes by
torchrun, as its manual has it. It evaluates in iteration 0, which is before anything is measured,
and then never again.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch
from federation import BATCH, LR, Federation, asked, ended, finished
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """pfl asks the model for its loss and its metrics."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(self.loss(inputs, targets).item() * len(targets), len(targets))}


class Clock(TrainingProcessCallback):
    def after_central_iteration(
        self, metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if leads():
            finished(central_iteration + 1)
        return False, Metrics()


def leads() -> bool:
    return os.environ.get("RANK", "0") == "0"


def shuffled(federation: Federation, client: int) -> Dataset:
    own = federation.examples(client)
    inputs, targets = federation.tensors
    order = torch.randperm(own.stop - own.start).add_(own.start)
    return Dataset((inputs[order], targets[order]), user_id=client)


def main() -> None:
    options = asked()
    if options.processes > 1 and "RANK" not in os.environ:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={options.processes}",
        ]
        os.execv(sys.executable, [*launcher, *sys.argv])
    torch.set_num_threads(options.threads)
    federation = Federation(options.file)
    module = Classifier(federation.torch_model())
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    clients = itertools.chain.from_iterable(federation.cohorts)
    data = FederatedDataset(lambda client: shuffled(federation, client), lambda: next(clients))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=federation.rounds,
            evaluation_frequency=federation.rounds + 1,
            train_cohort_size=len(federation.cohorts[0]),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    if leads():
        ended(federation.accuracy(module.inner), "pfl", "torch")


if __name__ == "__main__":
    main()
