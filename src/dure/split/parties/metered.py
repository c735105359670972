"""Meters in a simulated run of parties: what each of them could guess, and the holder of each.

They stand before the holder of the labels, one for each party that has none, and read what comes
and what leaves. Batches are put together until there are 128 examples; each such window is measured
and dropped, and its numbers go into the history of the step that has closed it:

    norm_leak_auc, direction_leak_auc    labels, from the gradients that the party is sent
    cluster_leak_auc                     labels, from what leaves its own head
    distance_correlation                 of its columns and what leaves its head: what the holder
                                         could make of it

Of a party they end with its name, as in norm_leak_auc_party_1; without it, it is the most that is
told of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.fleet.virtual import Envelope, Message, Node
from dure.split.leakage.guard import Crossing
from dure.split.leakage.meter import LeakMeter
from dure.split.parties.messages import ActivationGradients, Activations

Held = Callable[[str, int], tuple[Tensor, Tensor]]
"""held(party, step): the rows of its batch in the task's data, and its columns of them."""


class PartyMeters:
    """Of a run. parties: the names of those who have no labels.

    labels: of all examples, int64 of shape (n,); None where there are none.
    """

    def __init__(
        self, parties: Sequence[str], labels: Tensor | None, classes: int, held: Held
    ) -> None:
        crossing = [Crossing(0, True)]
        self.held = held
        self._meters = {name: LeakMeter(labels, classes, crossing, crossing) for name in parties}
        self.latest: dict[str, float] = {}
        """The newest numbers, by name."""

    def came(self, sender: str, message: Activations) -> None:
        """What has left the head of a party."""
        if sender in self._meters:
            rows, columns = self.held(sender, message.step)
            self._meters[sender].smashed([message.values], rows, [columns])

    def left(self, name: str, message: ActivationGradients) -> None:
        """What a party is sent for it."""
        if name in self._meters and message.values is not None:
            rows, _ = self.held(name, message.step)
            self._meters[name].gradients([message.values], rows)

    def numbers(self) -> dict[str, float]:
        """What was measured in a step, which is over."""
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
        """What they need to go on after a step."""
        windows = {name: meter.state() for name, meter in self._meters.items()}
        return {"windows": windows, "latest": dict(self.latest)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.latest = dict(state["latest"])
        for name, meter in self._meters.items():
            meter.restore(state["windows"][name])


class Metered:
    """The holder of the labels, with meters before it."""

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
