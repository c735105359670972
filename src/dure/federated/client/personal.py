"""Models measured client by client, on data that each has held out.

It shows how fair the global model is, and what clients' own are worth.

    client_<metric>      the global model on a client's held-out examples
    personal_<metric>    the client's own model there: what its algorithm keeps for it (FedPer,
                         Ditto), or the global model after some epochs on the data that the client
                         has by then (fine-tuning)

A metric means here what it means on the test data, over a client's examples alone. The server makes
of them the mean over clients, and the worst tenth.

A model of a client's own is measured with the buffers that it was trained with, such as its
batch-norm statistics; FedPer's are shared. With more than a thousand clients a fixed sample of a
thousand is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.federated.algorithm import Own
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from dure.tasks.measurement import Measurement
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import Frozen

MOST = 1_000
"""Clients that are measured."""


class Personal:
    """What measures models client by client.

    fresh: makes one more model like the run's. held_out: the examples of each client, as indices
    into `examples`; none measures nothing, and needs no model. fine_tune: epochs on its own data
    before a client's model is measured.
    """

    def __init__(
        self,
        task: Task,
        fresh: Callable[[], nn.Module],
        examples: Examples,
        held_out: Sequence[Tensor],
        seed: int,
        fine_tune: int,
    ) -> None:
        self.task = task
        self.examples = examples
        self.held_out = held_out
        self.fine_tune = fine_tune
        self._fresh = fresh
        # A client measures by itself.
        self._alone = Group()
        chosen: list[int] = []
        if held_out:
            chosen = Permutation(len(held_out), derive(seed, "measured clients")).first(MOST)
        self.clients = sorted(client for client in chosen if len(held_out[client]))

    def count(self, client: int) -> int:
        """How many examples a client has held out."""
        return len(self.held_out[client]) if self.held_out else 0

    # Made when somebody measures: most runs hold nothing out, and need no second model.
    @cached_property
    def model(self) -> nn.Module:
        """A model that takes the weights and buffers of each client in turn."""
        model: nn.Module = self._fresh()
        return model

    @cached_property
    def flat(self) -> FlatParameters:
        return FlatParameters(self.model)

    @cached_property
    def frozen(self) -> Frozen:
        return Frozen(self.model)

    @cached_property
    def buffers(self) -> Buffers:
        return Buffers(self.model)

    def over(self, models: Iterable[Own]) -> dict[str, list[float]]:
        """Every metric of the model of each client in `clients`, one number a client.

        Models are taken one after another, and one is kept at a time. Raises ValueError if
        measuring changes frozen parameters.
        """
        results: dict[str, list[float]] = {name: [] for name in ("loss", *self.task.measures)}
        loaded: Own | None = None
        # Models first: those of an engine then come to their end. Others may have none.
        for own, client in zip(models, self.clients, strict=False):
            self.model.eval()
            with torch.no_grad():
                if own is not loaded:
                    self._load(own)
                    loaded = own
                for name, value in self._of(self.held_out[client]).items():
                    results[name].append(value)
        if loaded is not None:
            self.frozen.check()
        return results

    def _load(self, own: Own) -> None:
        self.frozen.check()  # known from here on: nothing was measured before
        self.flat.load(own.weights)
        assert own.buffers is not None
        self.buffers.load(self.model, own.buffers)

    def _of(self, indices: Tensor) -> dict[str, float]:
        """Every metric of the model that is loaded, on these examples."""
        measurement = Measurement(self.task, examples=len(indices), share=len(indices))
        for part in torch.split(indices, self.task.eval_batch_size):
            inputs, targets = self.examples.batch(part)
            measurement.add(self.model(inputs), targets, len(part))
        return measurement.values(self._alone)
