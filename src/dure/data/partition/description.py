"""What a partition gave each client, in words and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dure.data.partition.partition import Partition
from dure.data.partition.parts import Parts

MOST_HISTOGRAMS = 10_000
"""Clients up to which descriptions have a label histogram of each."""

MOST_NUMBERS = 10_000_000
"""The numbers, clients times classes, up to which descriptions have histograms."""


@dataclass(frozen=True)
class Description:
    """What a partition gave each client.

    As a dict it is the `partition` entry of a run's config.json.

    description: the partition in words. counts: examples of each client. label_histograms: for each
        client how often it has each class, None without labels or for more than 10,000 clients.
        classes: their names, for printing only. names: the clients', None where they have none.
    """

    description: str
    counts: list[int]
    label_histograms: list[list[int]] | None
    classes: list[str] | None = None
    names: list[str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """description, counts, label_histograms and names, of types that JSON has."""
        found = {
            "description": self.description,
            "counts": self.counts,
            "label_histograms": self.label_histograms,
        }
        return found if self.names is None else {**found, "names": self.names}

    def __str__(self) -> str:
        """A table of at most 20 clients, with the classes across."""
        shown = range(min(len(self.counts), 20))
        rows = [["client", "examples", *(self.classes or [])]]
        for client in shown:
            histogram = self.label_histograms[client] if self.label_histograms else []
            name = str(client) if self.names is None else self.names[client]
            rows.append([name, str(self.counts[client]), *map(str, histogram)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        hidden = len(self.counts) - len(shown)
        sizes = f"{min(self.counts)} to {max(self.counts)} examples each"
        title = f"{self.description}: {len(self.counts)} clients, {sizes}"
        return "\n".join([title, *lines, *([f"... and {hidden} clients more"] if hidden else [])])


def describe(
    partition: Partition,
    parts: Sequence[Tensor],
    labels: Tensor | None,
    classes: Sequence[str] | None = None,
    names: list[str] | None = None,
) -> Description:
    """Counts and, where there are labels of shape (n,), label histograms of the clients' `parts`.

    classes: the labels' names; without them the classes are 0..max(labels). names: the clients'.
    """
    divided = parts if isinstance(parts, Parts) else Parts.of(parts)
    counts: list[int] = divided.sizes.tolist()
    if labels is None or len(counts) > MOST_HISTOGRAMS:
        return Description(partition.description, counts, None, names=names)
    number = max(int(labels.max()) + 1, len(classes or ()))
    if int(labels.min()) < 0 or number * len(counts) > MOST_NUMBERS:  # no classes 0, 1, …
        return Description(partition.description, counts, None, names=names)
    # One histogram of pairs (client, class), as one number each.
    together = torch.bincount(divided.owners * number + labels, minlength=number * len(counts))
    histograms: list[list[int]] = together.view(-1, number).tolist()
    of_classes = (
        list(classes)
        if classes is not None and len(classes) == number
        else list(map(str, range(number)))
    )
    return Description(partition.description, counts, histograms, of_classes, names)
