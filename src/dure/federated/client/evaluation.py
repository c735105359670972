"""Evaluation of models client by client, on data outside the client's training.

The measurements show the fairness of the global model, the value of personalised models, and a
model's performance on newly arrived data.

    client_<metric>           the global model on a client's held-out examples, or on the test
                              examples that carry the client's key
    personal_<metric>         the client's personalised model on the same examples: the model that
                              the algorithm stores for the client (FedPer, Ditto), or the global
                              model after some epochs on the client's present data (fine-tuning)
    newest_<metric>           the global model on the training examples that a client has now and
                              did not have at its last training start: it was trained on none of
                              them
    frozen_newest_<metric>    the model of an earlier round, on the same examples

A metric is defined as on the test data, over a client's examples alone. With its number a client
reports the number of examples, and the sums from which the metric is computed; the server computes
from them the number over all clients' examples, and the spread over clients
(`dure.federated.server.client_metrics`).

A personalised model is measured with the buffers of its training, such as its batch-norm
statistics; FedPer's buffers are shared. With more than a thousand clients a fixed sample of a
thousand is measured.

A client that cannot measure (its metric raises, it has no examples) reports the reason, and the
other clients are measured. If one metric raises, the client still has the others.

Source of measuring on the newest data before training on them (prequential, test then train): A. P.
Dawid, "Statistical Theory: The Prequential Approach", J. R. Statist. Soc. A 147, 1984; J. Gama, R.
Sebastião, P. P. Rodrigues, "On evaluating stream learning algorithms", Machine Learning 90, 2013.
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
from dure.federated.algorithm import PersonalisedModel
from dure.machine.devices import device_of_model, to_device
from dure.protocol.messages import EvaluationResults
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from dure.tasks.measurement import Measurement
from dure.tasks.sums import MetricSums
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import FrozenSnapshot

MOST = 1_000
"""Largest number of measured clients."""


class ClientMeasurement(NamedTuple):
    """A client's measurements and number of examples. failure: why a value is missing."""

    examples: int
    values: dict[str, float]
    sums: dict[str, MetricSums]
    failure: str | None = None


NOTHING_THERE = "it has no examples to measure with"


class ClientEvaluator:
    """Evaluator of models, client by client.

    Args:
        task: the task of the run.
        fresh: makes a new model like the run's.
        examples: examples for the measurements.
        held_out: the examples of each client, as indices into `examples`; an empty list measures
            nothing, and needs no model.
        seed: of the sample of measured clients.
        fine_tune: epochs on its own data before a client's model is measured.
        newest: (training examples, indices of each client) for measurements on newly arrived data;
            None without them.
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
        # A group of a single rank: a client measures alone.
        self._alone = Group()
        self._seed = seed
        chosen = self._chosen(len(held_out))
        self.clients = [client for client in chosen if len(held_out[client])]
        self.without = [client for client in chosen if not len(held_out[client])]
        """Measured clients without any examples to measure."""
        self.comers = [] if newest is None else self._chosen(len(newest[1]))
        """Clients measured on their newest data."""

    def _chosen(self, clients: int) -> list[int]:
        if not clients:
            return []
        return sorted(Permutation(clients, derive(self._seed, "measured clients")).first(MOST))

    def count(self, client: int) -> int:
        """Return the number of held-out examples of a client."""
        return len(self.held_out[client]) if self.held_out else 0

    # Made on demand: most runs hold nothing out, and need no second model.
    @cached_property
    def model(self) -> nn.Module:
        """Model that takes the weights and buffers of each client in turn."""
        model: nn.Module = self._fresh()
        return model

    @cached_property
    def flat(self) -> FlatParameters:
        return FlatParameters(self.model)

    @cached_property
    def frozen(self) -> FrozenSnapshot:
        return FrozenSnapshot(self.model)

    @cached_property
    def buffers(self) -> BufferNames:
        return BufferNames(self.model)

    def over(self, models: Iterable[PersonalisedModel]) -> dict[int, ClientMeasurement]:
        """Return the measurements of each client's model on the client's held-out examples.

        Models are taken one after another, and only the current model is in memory. Raises
        ValueError if the measurement changes frozen parameters.
        """
        parts = (self.held_out[client] for client in self.clients)
        # Models come first in `zip`: an engine's iterator then runs to its end. Other iterators may
        # be endless.
        return self._measured(models, self.clients, self.examples, parts)

    def of_the_newest(
        self, model: PersonalisedModel, parts: Mapping[int, Tensor]
    ) -> dict[int, ClientMeasurement]:
        """Return the measurements of a single model on the training examples of each client."""
        assert self.newest is not None
        return self._measured(repeat(model), list(parts), self.newest[0], parts.values())

    def losses(
        self,
        examples: Examples,
        model: PersonalisedModel,
        clients: Sequence[int],
        parts: Sequence[Tensor],
    ) -> list[float]:
        """Return the mean loss of a single model on the examples of each client.

        Raises WorkerFailedError, with the client's name, if user code raises.
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
                    raise WorkerFailedError(who, when, error_line(error)) from error
                found.append(values["loss"])
        self.frozen.check()
        return found

    def _measured(
        self,
        models: Iterable[PersonalisedModel],
        clients: Sequence[int],
        examples: Examples,
        parts: Iterable[Tensor],
    ) -> dict[int, ClientMeasurement]:
        found = {}
        loaded: PersonalisedModel | None = None
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

    def _load(self, own: PersonalisedModel) -> None:
        self.frozen.check()  # initialises the cached property before the first measurement
        self.flat.load(own.weights)
        assert own.buffers is not None
        self.buffers.load(self.model, own.buffers)

    def _of(self, examples: Examples, indices: Tensor) -> ClientMeasurement:
        """Return every metric of the loaded model on these examples."""
        try:
            added = self._added(self.task, examples, indices)
            return ClientMeasurement(len(indices), added.values(self._alone), added.sums())
        # Any error of user code: of the data, the model or a metric, on this client's examples.
        except Exception as error:
            failure = error_line(error)
        # Retry one metric after another, to measure the metrics that work.
        whole = ClientMeasurement(len(indices), {}, {}, failure)
        for metrics in [{}, *({name: metric} for name, metric in self.task.measures.items())]:
            task = replace(self.task, metrics=metrics)
            # The first error is reported.
            with contextlib.suppress(Exception):
                added = self._added(task, examples, indices)
                # Sums count even if a client alone cannot compute a number from them.
                whole.sums.update(added.sums())
                whole.values.update(added.values(self._alone))
        return whole

    def _added(self, task: Task, examples: Examples, indices: Tensor) -> Measurement:
        measurement = Measurement(task, examples=len(indices), share=len(indices))
        device = device_of_model(self.model)
        for part in torch.split(indices, task.eval_batch_size):
            inputs, targets = examples.batch(part)
            if device.type != "cpu":
                inputs, targets = to_device((inputs, targets), device)
            measurement.add(self.model(inputs), targets, len(part))
        return measurement


def measured_by(
    whose: Mapping[str, Mapping[int, ClientMeasurement]],
    names: Sequence[str],
    without: Iterable[int] = (),
) -> EvaluationResults:
    """Return the message with the clients' measurements.

    whose: prefix of metric names -> client -> its measurements. names: metric names. without:
    clients without examples to measure.
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
            # Sums are added only if all clients have sums of the same form.
            if len(kinds) == 1 and None not in kinds:
                sums[full] = [[] if one is None else one.sums[name].values for one in has]
                forms[full] = next(each.form for each in there if each is not None)
    return EvaluationResults(clients, values, examples, sums, forms, dict(sorted(failures.items())))


def error_line(error: Exception) -> str:
    """Return an error in a single line."""
    text = " ".join(text_of(error).split())
    # A failed metric already names itself (`dure.tasks.metric_state`).
    return text if text.startswith("the metric ") else f"{type(error).__name__}: {text}"
