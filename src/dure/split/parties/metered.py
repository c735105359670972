"""Leakage meters in a simulated vertical run: the attacks of each party, and of the holder.

The meters observe the messages to and from the holder of the labels, with a meter for each party
without labels. Batches are collected into windows of 128 examples. Each window is measured and
discarded, and its values go into the history of the step that completed the window:

    norm_leak_auc, direction_leak_auc    labels, from the gradients that the party receives
    cluster_leak_auc                     labels, from the output of the party's own head
    distance_correlation                 between the party's columns and the output of its head:
                                         the information that the holder has about the columns

The metric of a party ends with its name, as in norm_leak_auc_party_1. The metric without a party is
the maximum over parties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.fleet.virtual_network import Envelope, Message, Node
from dure.split.leakage.guard import CutValue
from dure.split.leakage.meter import LeakMeter
from dure.split.parties.messages import ActivationGradients, Activations

ReadBatch = Callable[[str, int], tuple[Tensor, Tensor]]
"""held(party, step): the rows of a batch in the task's data, and the party's columns of them."""


class PartyMeters:
    """Leakage meters of a run.

    parties: names of the parties without labels. labels: of all examples, int64 of shape (n,); None
    if the task has no class labels.
    """

    def __init__(
        self, parties: Sequence[str], labels: Tensor | None, classes: int, held: ReadBatch
    ) -> None:
        crossing = [CutValue(0, True)]
        self.held = held
        self._meters = {name: LeakMeter(labels, classes, crossing, crossing) for name in parties}
        self.latest: dict[str, float] = {}
        """Newest values, by metric."""

    def came(self, sender: str, message: Activations) -> None:
        """Record the output of a party's head."""
        if sender in self._meters:
            rows, columns = self.held(sender, message.step)
            self._meters[sender].smashed([message.values], rows, [columns])

    def left(self, name: str, message: ActivationGradients) -> None:
        """Record the gradients that a party receives."""
        if name in self._meters and message.values is not None:
            rows, _ = self.held(name, message.step)
            self._meters[name].gradients([message.values], rows)

    def numbers(self) -> dict[str, float]:
        """Return the values measured in the finished step, by metric."""
        most: dict[str, float] = {}
        of_parties: dict[str, float] = {}
        for party, meter in self._meters.items():
            for name, value in meter.measured().items():
                most[name] = max(value, most.get(name, value))
                of_parties[f"{name}_{party.replace(' ', '_')}"] = value
        found = {**most, **of_parties}
        self.latest.update(found)
        return found

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint after a step."""
        windows = {name: meter.state() for name, meter in self._meters.items()}
        return {"windows": windows, "latest": dict(self.latest)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.latest = dict(state["latest"])
        for name, meter in self._meters.items():
            meter.restore(state["windows"][name])


class MeteredHolder:
    """Wrapper around the holder of the labels that passes its messages to the meters."""

    def __init__(self, holder: Node, meters: PartyMeters) -> None:
        self.holder = holder
        self.meters = meters

    @property
    def wake(self) -> float:
        return self.holder.wake

    def tick(self, now: float) -> list[Envelope]:
        return self._seen(self.holder.tick(now))

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        if isinstance(message, Activations):
            self.meters.came(sender, message)
        return self._seen(self.holder.receive(sender, message, now))

    def _seen(self, said: list[Envelope]) -> list[Envelope]:
        for name, message in said:
            if isinstance(message, ActivationGradients):
                self.meters.left(name, message)
        return said
