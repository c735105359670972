"""A separate head and tail over a network: forms of the values, and evaluation.

Each side has only the form of the other side's values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.split.blame import InvalidMessageError
from dure.split.network.checks import ServerPartInterface
from dure.split.network.control import Query, QueryAnswer
from dure.split.network.site import ClientPartInterface
from dure.split.separate_models.form import OutputForm, flatten
from dure.split.separate_models.sides import ClientPart, ServerPart
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode


class SeparateServerPart(ServerPartInterface):
    """The tail. targets: form of a batch's targets, if the server computes the loss."""

    def __init__(self, part: ServerPart, targets: OutputForm | None) -> None:
        self._part = part
        self._targets = targets
        self._measurement: Measurement | None = None

    def arrived(self, values: Sequence[Tensor], examples: int, training: bool) -> list[Tensor]:
        form = self._part.arriving
        form.check(values, examples, "the head")
        return [one.laid_out(value) for one, value in zip(form.tensors, values, strict=True)]

    def check_returned(self, gradients: Sequence[Tensor], examples: int) -> None:
        form = self._part.leaving
        if form is None:
            raise InvalidMessageError("gradients were sent, but the loss is here")
        form.of_gradients().check(gradients, examples, "the end")

    def answer(self, values: Sequence[Tensor], query: Query) -> QueryAnswer:
        tail = self._part.model.tail
        assert tail is not None
        if (self._targets is None) != (query.targets is None):
            raise InvalidMessageError("test examples need their targets if the server has the loss")
        with torch.no_grad(), in_mode(tail, training=False):
            found = tail(self._part.arriving.whole(values))
            if self._targets is not None and query.targets is not None:
                return self._measures(found, query, self._targets)
        return QueryAnswer(tuple(flatten(found, "the tail")[1]))

    def _measures(self, outputs: Any, query: Query, form: OutputForm) -> QueryAnswer:
        """Add a batch to the server's measurement."""
        assert query.targets is not None
        form.check(query.targets, query.examples, "the client")
        if self._measurement is None:
            self._measurement = Measurement(self._part.task, examples=query.of, share=query.of)
        self._measurement.add(outputs, form.whole(query.targets), query.examples)
        return QueryAnswer(())

    def measured(self) -> dict[str, float]:
        measurement = self._measurement
        self._measurement = None
        if measurement is None or measurement.measured != measurement.examples:
            return {}
        values = measurement.values(Group())
        return {f"test_{name}": one for name, one in values.items() if math.isfinite(one)}


class SeparateClientPart(ClientPartInterface):
    """The head, and in the U-shape the end. arriving: form of the tail's output for the end."""

    def __init__(self, part: ClientPart, arriving: OutputForm | None) -> None:
        self._part = part
        self._arriving = arriving

    def query(self, inputs: Any, targets: Any, examples: int, of: int) -> Query:
        head = self._part.model.head
        assert head is not None
        with torch.no_grad(), in_mode(head, training=False):
            values = flatten(head(inputs), "the head")[1]
        if self._part.model.end is not None:
            return Query(examples, tuple(values), of=of)
        return Query(examples, tuple(values), flatten(targets, "the data")[1], of)

    def outputs(self, answer: QueryAnswer, inputs: Any, examples: int) -> Any:
        end = self._part.model.end
        if end is None or self._arriving is None:
            return None
        self._arriving.check(answer.values, examples, "the tail")
        with torch.no_grad(), in_mode(end, training=False):
            return end(self._arriving.whole(answer.values))
