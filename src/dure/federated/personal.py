"""Models measured client by client, on data that each has held out: how fair the global one is, and what clients'
own are worth.

    client_<metric>      the global model on a client's held-out examples: mean over clients, and the worst tenth
    personal_<metric>    the client's own model there: what its algorithm keeps for it (FedPer, Ditto), or the global
                         model after some epochs on the client's own data (fine-tuning)

Every client counts alike. With more than a thousand clients a fixed sample of a thousand is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dure.data.examples import Examples
from dure.evaluation import BATCH, ratio, sum_and_count
from dure.federated.algorithm import Algorithm
from dure.federated.clients import Clients, spread
from dure.federated.cohort.job import Job
from dure.federated.global_model import GlobalModel
from dure.flat import FlatParameters
from dure.fleet.permutation import Permutation
from dure.randomness import derive
from dure.task import Task

MOST = 1_000


class Personal:
    """held_out: the examples of each client, as indices into `examples`; none measures nothing."""

    def __init__(
        self, task: Task, model: nn.Module, examples: Examples, held_out: Sequence[Tensor], seed: int, fine_tune: int
    ) -> None:
        self.task, self.model, self.examples, self.held_out = task, model, examples, held_out
        self.fine_tune = fine_tune
        self.flat = FlatParameters(model)
        chosen = Permutation(len(held_out), derive(seed, "measured clients")).first(MOST) if held_out else []
        self.clients = sorted(client for client in chosen if len(held_out[client]))
        self.latest: dict[str, list[float]] = {}

    def measured(self, algorithm: Algorithm, model: GlobalModel, clients: Clients) -> dict[str, float]:
        """Means and worst tenths; empty where nothing is held out."""
        if not self.clients:
            return {}
        whole = algorithm.whole(model.weights, clients.memories)
        self.latest = {
            f"client_{name}": values for name, values in self._over(lambda client: whole, model.buffers).items()
        }
        own = {client: algorithm.own(model.weights, clients.memories.get(client)) for client in self.clients}
        if self.fine_tune:
            tuned = self._tuned(whole, own, model, clients)
            own = {client: tuned[client] for client in self.clients}
        if any(weights is not None for weights in own.values()):
            measured = self._over(lambda client: own[client] or whole, model.buffers)
            self.latest |= {f"personal_{name}": values for name, values in measured.items()}
        return {
            key: value
            for name, values in self.latest.items()
            for key, value in ((name, spread(values)["mean"]), (f"{name}_p10", spread(values)["p10"]))
            if not (key.endswith("_p10") and "loss" in name)
        }

    def facts(self) -> dict[str, Any]:
        """The newest measurement of each client."""
        return {"measured_clients": self.clients, "by_client": self.latest} if self.latest else {}

    def _over(self, weights_of: Any, buffers: Sequence[Tensor]) -> dict[str, list[float]]:
        """Every metric, for each of the clients."""
        results: dict[str, list[float]] = {name: [] for name in ("loss", *self.task.measures)}
        self.model.eval()
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            loaded: Any = None
            for client in self.clients:
                weights = weights_of(client)
                if weights is not loaded:
                    self.flat.load(weights)
                    loaded = weights
                for name, measured in self._of(self.held_out[client]).items():
                    results[name].append(measured)
        return results

    def _of(self, indices: Tensor) -> dict[str, float]:
        totals = {name: [0.0, 0.0] for name in ("loss", *self.task.measures)}
        for part in torch.split(indices, BATCH):
            inputs, targets = self.examples.batch(part)
            outputs = self.model(inputs)
            measures = {"loss": self.task.loss, **self.task.measures}
            for name, measure in measures.items():
                total, count = sum_and_count(measure(outputs, targets), len(part))
                totals[name][0] += total
                totals[name][1] += count
        return {name: ratio(total, count) for name, (total, count) in totals.items()}

    def _tuned(
        self, whole: list[Tensor], own: dict[int, list[Tensor] | None], model: GlobalModel, clients: Clients
    ) -> dict[int, list[Tensor]]:
        """Every client's model after `fine_tune` epochs on its own data."""
        jobs = []
        for client in self.clients:
            indices = clients.parts[client]
            steps = self.fine_tune * clients.local.per_epoch(len(indices))
            start = own[client] or whole
            jobs.append(Job(client, model.number, indices, start, model.buffers, model.number * steps, steps))
        engine = clients.engine(jobs)
        trained = getattr(engine, "tune", engine.train)(jobs)
        return {
            job.client: [w + d for w, d in zip(job.weights, result.delta, strict=True)]
            for job, result in zip(jobs, trained, strict=True)
        }
