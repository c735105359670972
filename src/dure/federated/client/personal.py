"""Models measured client by client, on data that each has held out: how fair the global one is, and
what clients' own are worth.

    client_<metric>      the global model on a client's held-out examples: mean over clients, and the worst tenth (_p10)
    personal_<metric>    the client's own model there: what its algorithm keeps for it (FedPer, Ditto), or the global
                         model after some epochs on the data that the client has by then
                         (fine-tuning)

A model of a client's own is measured with the buffers that it was trained with, as its batch-norm
statistics; FedPer's are shared.

A tenth of the clients is at the worst tenth or worse: the 0.1 quantile, or 0.9 where lower is
better. Losses have none. Every client counts alike. With more than a thousand clients a fixed
sample of a thousand is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.lr_schedule import factor_at
from dure.contracts.strategy import another
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.federated.algorithm import Algorithm, Own
from dure.federated.client.clients import Clients
from dure.federated.engines.job import Job
from dure.federated.server.global_model import GlobalModel
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from dure.record.history import lower_is_better
from dure.tasks.evaluation import measured, ratio
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters

MOST = 1_000
TOGETHER = 50
"""Clients whose models are tuned at once."""


class Personal:
    """held_out: the examples of each client, as indices into `examples`; none measures nothing, and
    needs no model."""

    def __init__(
        self,
        task: Task,
        fresh: nn.Module,
        examples: Examples,
        held_out: Sequence[Tensor],
        seed: int,
        fine_tune: int,
    ) -> None:
        self.task = task
        self.examples = examples
        self.held_out = held_out
        self.fine_tune = fine_tune
        self._one_like_it = partial(another, fresh, task, seed)
        chosen = (
            Permutation(len(held_out), derive(seed, "measured clients")).first(MOST)
            if held_out
            else []
        )
        self.clients = sorted(client for client in chosen if len(held_out[client]))
        self.latest: dict[str, list[float]] = {}

    def measured(
        self, algorithm: Algorithm, model: GlobalModel, clients: Clients, now: float
    ) -> dict[str, float]:
        """Means and worst tenths; empty where nothing is held out. now: in the federation's
        time."""
        if not self.clients:
            return {}
        whole = Own(algorithm.whole(model.weights, clients.memories), model.buffers)
        self.latest = {
            f"client_{name}": values for name, values in self._over(repeat(whole)).items()
        }

        def own(client: int) -> Own:
            """What the algorithm keeps for a client; the global model where that is nothing."""
            kept = algorithm.own(model.weights, clients.memories.get(client))
            return (
                whole
                if kept is None
                else kept
                if kept.buffers is not None
                else kept._replace(buffers=model.buffers)
            )

        personal: Iterator[Own] | None = None
        if self.fine_tune:
            personal = self._tuned(own, model.number, clients, now)
        elif any(own(client) is not whole for client in self.clients):
            personal = map(own, self.clients)
        if personal is not None:
            self.latest |= {
                f"personal_{name}": values for name, values in self._over(personal).items()
            }
        return {
            key: value
            for name, values in self.latest.items()
            for key, value in _over_clients(name, values).items()
        }

    @cached_property
    def model(self) -> nn.Module:
        """Which has the weights and buffers of whoever is measured."""
        model: nn.Module = self._one_like_it()
        return model

    @cached_property
    def flat(self) -> FlatParameters:
        return FlatParameters(self.model)

    @cached_property
    def buffers(self) -> Buffers:
        return Buffers(self.model)

    def facts(self) -> dict[str, Any]:
        """The newest measurement of each client."""
        return {"measured_clients": self.clients, "by_client": self.latest} if self.latest else {}

    def _over(self, models: Iterable[Own]) -> dict[str, list[float]]:
        """Every metric, for each of the clients, of its model; one is kept at a time."""
        results: dict[str, list[float]] = {name: [] for name in ("loss", *self.task.measures)}
        loaded: Own | None = None
        for own, client in zip(models, self.clients, strict=False):  # models come to their end
            self.model.eval()
            with torch.no_grad():
                if own is not loaded:
                    self._load(own)
                    loaded = own
                for name, measured in self._of(self.held_out[client]).items():
                    results[name].append(measured)
        return results

    def _load(self, own: Own) -> None:
        self.flat.load(own.weights)
        assert own.buffers is not None
        self.buffers.load(self.model, own.buffers)

    def _of(self, indices: Tensor) -> dict[str, float]:
        names = ["loss", *self.task.measures]
        totals = {name: [0.0, 0.0] for name in names}
        for part in torch.split(indices, self.task.eval_batch_size):
            inputs, targets = self.examples.batch(part)
            outputs = self.model(inputs)
            for name, (total, count) in zip(
                names, measured(self.task, outputs, targets, len(part)), strict=True
            ):
                totals[name][0] += total
                totals[name][1] += count
        return {name: ratio(total, count) for name, (total, count) in totals.items()}

    def _tuned(
        self, own: Callable[[int], Own], number: int, clients: Clients, now: float
    ) -> Iterator[Own]:
        """Every client's model after `fine_tune` epochs on the data that it has now."""
        for start in range(0, len(self.clients), TOGETHER):
            jobs = []
            for client in self.clients[start : start + TOGETHER]:
                indices, before = clients.indices(client, now), own(client)
                steps = self.fine_tune * clients.local.per_epoch(len(indices))
                assert before.buffers is not None
                factor = factor_at(self.task.lr_schedule, max(number - 1, 0))  # of the last round
                of = (
                    client,
                    number,
                    indices,
                    before.weights,
                    before.buffers,
                    number * steps,
                    steps,
                )
                jobs.append(Job(*of, lr_factor=factor))
            engine = clients.engine(jobs)
            for job, result in zip(jobs, getattr(engine, "tune", engine.train)(jobs), strict=True):
                yield Own(
                    [w + d for w, d in zip(job.weights, result.delta, strict=True)], result.buffers
                )


def _over_clients(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean over clients, and the worst tenth: how fair a model is to them. Who has nothing to
    count is no part."""
    of = torch.tensor(values, dtype=torch.float64)
    mean = {name: float(of.nanmean())}
    if "loss" in name:
        return mean
    return {**mean, f"{name}_p10": float(of.nanquantile(0.9 if lower_is_better(name) else 0.1))}
