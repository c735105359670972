"""Models measured client by client, on data that each does not train on.

It shows how fair the global model is, what clients' own are worth, and what a model is worth on
data that have only just come.

    client_<metric>           the global model on a client's held-out examples, or on the test
                              examples that carry the client's key
    personal_<metric>         the client's own model there: what its algorithm keeps for it (FedPer,
                              Ditto), or the global model after some epochs on the data that the
                              client has by then (fine-tuning)
    newest_<metric>           the global model on the training examples that a client has now and
                              had not when it last began to train: none of them was trained on
    frozen_newest_<metric>    the model as it was at an earlier round, on the same examples

A metric means here what it means on the test data, over a client's examples alone. With its number
a client tells with how many examples it measured, and the sums that it is made of; the server makes
the number over all clients' examples of them, and how it is spread over clients
(`dure.federated.server.by_client`).

A model of a client's own is measured with the buffers that it was trained with, such as its
batch-norm statistics; FedPer's are shared. With more than a thousand clients a fixed sample of a
thousand is measured.

A client that cannot measure (its metric raises, it has no examples) says why, and the others are
measured. Where one metric raises, the client has the others.

Source of measuring on the newest data before they are trained on (prequential, test then train):
A. P. Dawid, "Statistical Theory: The Prequential Approach", J. R. Statist. Soc. A 147, 1984; J.
Gama, R. Sebastião, P. P. Rodrigues, "On evaluating stream learning algorithms", Machine Learning
90, 2013.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import WorkerFailedError, text_of
from dure.federated.algorithm import Own
from dure.machine.devices import home_of, to_device
from dure.protocol.messages import Measured
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from dure.tasks.measurement import Measurement
from dure.tasks.sums import Sums
from dure.tensors.buffers import Buffers
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import Frozen

MOST = 1_000
"""Clients that are measured."""


class One(NamedTuple):
    """What one client has measured with so many examples. failure: why something is missing."""

    examples: int
    values: dict[str, float]
    sums: dict[str, Sums]
    failure: str | None = None


NOTHING_THERE = "it has no examples to measure with"


class Personal:
    """What measures models client by client.

    fresh: makes one more model like the run's. held_out: the examples of each client, as indices
    into `examples`; none measures nothing, and needs no model. fine_tune: epochs on its own data
    before a client's model is measured. newest: (the training examples, those of each client),
    where measured on those that have just come.
    """

    def __init__(
        self,
        task: Task,
        fresh: Callable[[], nn.Module],
        examples: Examples,
        held_out: Sequence[Tensor],
        seed: int,
        fine_tune: int,
        newest: tuple[Examples, Sequence[Tensor]] | None = None,
    ) -> None:
        self.task = task
        self.examples = examples
        self.held_out = held_out
        self.fine_tune = fine_tune
        self.newest = newest
        self._fresh = fresh
        # A client measures by itself.
        self._alone = Group()
        self._seed = seed
        chosen = self._chosen(len(held_out))
        self.clients = [client for client in chosen if len(held_out[client])]
        self.without = [client for client in chosen if not len(held_out[client])]
        """Those who are asked, but have nothing to measure with."""
        self.comers = [] if newest is None else self._chosen(len(newest[1]))
        """Those who are asked about their newest data."""

    def _chosen(self, clients: int) -> list[int]:
        if not clients:
            return []
        return sorted(Permutation(clients, derive(self._seed, "measured clients")).first(MOST))

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

    def over(self, models: Iterable[Own]) -> dict[int, One]:
        """The model of each client in `clients`, on what it has held out.

        Models are taken one after another, and one is kept at a time. Raises ValueError if
        measuring changes frozen parameters.
        """
        parts = (self.held_out[client] for client in self.clients)
        # Models first: those of an engine then come to their end. Others may have none.
        return self._measured(models, self.clients, self.examples, parts)

    def of_the_newest(self, model: Own, parts: Mapping[int, Tensor]) -> dict[int, One]:
        """One model on the training examples of each of these clients."""
        assert self.newest is not None
        return self._measured(repeat(model), list(parts), self.newest[0], parts.values())

    def losses(
        self, examples: Examples, model: Own, clients: Sequence[int], parts: Sequence[Tensor]
    ) -> list[float]:
        """The mean loss of one model on these examples of each of these clients.

        Raises WorkerFailedError, which names the client, when the user's own code raises.
        """
        alone = replace(self.task, metrics={})
        found: list[float] = []
        self.model.eval()
        with torch.no_grad():
            self._load(model)
            for client, part in zip(clients, parts, strict=True):
                try:
                    values = self._added(alone, examples, part).values(self._alone)
                except Exception as error:
                    who, when = f"client {client}", "telling its loss"
                    raise WorkerFailedError(who, when, told(error)) from error
                found.append(values["loss"])
        self.frozen.check()
        return found

    def _measured(
        self,
        models: Iterable[Own],
        clients: Sequence[int],
        examples: Examples,
        parts: Iterable[Tensor],
    ) -> dict[int, One]:
        found = {}
        loaded: Own | None = None
        for own, client, part in zip(models, clients, parts, strict=False):
            self.model.eval()
            with torch.no_grad():
                if own is not loaded:
                    self._load(own)
                    loaded = own
                found[client] = self._of(examples, part)
        if loaded is not None:
            self.frozen.check()
        return found

    def _load(self, own: Own) -> None:
        self.frozen.check()  # known from here on: nothing was measured before
        self.flat.load(own.weights)
        assert own.buffers is not None
        self.buffers.load(self.model, own.buffers)

    def _of(self, examples: Examples, indices: Tensor) -> One:
        """Every metric of the model that is loaded, on these examples."""
        try:
            added = self._added(self.task, examples, indices)
            return One(len(indices), added.values(self._alone), added.sums())
        # The user's own code, of the data, the model or a metric, on this client's examples.
        except Exception as error:
            failure = told(error)
        # One metric after another: those that can be measured are.
        whole = One(len(indices), {}, {}, failure)
        for metrics in [{}, *({name: metric} for name, metric in self.task.measures.items())]:
            task = replace(self.task, metrics=metrics)
            # The first error is the one that is told.
            with contextlib.suppress(Exception):
                added = self._added(task, examples, indices)
                # Sums count also where they are none of which a client alone can make a number.
                whole.sums.update(added.sums())
                whole.values.update(added.values(self._alone))
        return whole

    def _added(self, task: Task, examples: Examples, indices: Tensor) -> Measurement:
        measurement = Measurement(task, examples=len(indices), share=len(indices))
        device = home_of(self.model)
        for part in torch.split(indices, task.eval_batch_size):
            inputs, targets = examples.batch(part)
            if device.type != "cpu":
                inputs, targets = to_device((inputs, targets), device)
            measurement.add(self.model(inputs), targets, len(part))
        return measurement


def measured_by(
    whose: Mapping[str, Mapping[int, One]], names: Sequence[str], without: Iterable[int] = ()
) -> Measured:
    """The message of what clients have measured.

    whose: prefix of the names of metrics -> client -> what it measured. names: of the metrics.
    without: clients that had nothing to measure with.
    """
    clients = sorted(
        {
            client
            for found in whose.values()
            for client, one in found.items()
            if one.values or one.sums
        }
    )
    values: dict[str, list[float]] = {}
    examples: dict[str, list[int]] = {}
    sums: dict[str, list[list[float]]] = {}
    forms: dict[str, str] = {}
    failures = dict.fromkeys(without, NOTHING_THERE)
    for prefix, found in whose.items():
        for client, one in found.items():
            if one.failure is not None:
                failures.setdefault(client, one.failure)
        for name in names:
            full = f"{prefix}_{name}"
            rows = [found.get(client) for client in clients]
            has = [
                one if one and (name in one.values or name in one.sums) else None for one in rows
            ]
            if not any(has):
                continue
            values[full] = [one.values.get(name, math.nan) if one else math.nan for one in has]
            examples[full] = [0 if one is None else one.examples for one in has]
            there = [one.sums.get(name) for one in has if one is not None]
            kinds = {None if each is None else (len(each.values), each.form) for each in there}
            # Added only where all clients have sums of one form.
            if len(kinds) == 1 and None not in kinds:
                sums[full] = [[] if one is None else one.sums[name].values for one in has]
                forms[full] = next(each.form for each in there if each is not None)
    return Measured(clients, values, examples, sums, forms, dict(sorted(failures.items())))


def told(error: Exception) -> str:
    """An error in a line."""
    text = " ".join(text_of(error).split())
    # A metric that failed has said so itself (`dure.tasks.tally`).
    return text if text.startswith("the metric ") else f"{type(error).__name__}: {text}"
