"""Description of a partition's result for each client, in words and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dure.data.partition.partition import ClientParts, Partition

MOST_HISTOGRAMS = 10_000
"""Most clients with a label histogram for each in descriptions."""

MOST_NUMBERS = 10_000_000
"""Most numbers, clients times classes, of histograms in descriptions."""


@dataclass(frozen=True)
class PartitionDescription:
    """Description of a partition; as a dict the `partition` entry of a run's config.json.

    Args:
        description: the partition in words.
        counts: number of examples of each client.
        label_histograms: for each client the number of examples of each class, None without labels
            or for more than 10,000 clients.
        classes: names of the classes, for printing only.
        names: names of the clients, None without names.
    """

    description: str
    counts: list[int]
    label_histograms: list[list[int]] | None
    classes: list[str] | None = None
    names: list[str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return description, counts, label_histograms and names, as JSON types."""
        found = {
            "description": self.description,
            "counts": self.counts,
            "label_histograms": self.label_histograms,
        }
        return found if self.names is None else {**found, "names": self.names}

    def __str__(self) -> str:
        """Return a table of at most 20 clients, with the classes across."""
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
) -> PartitionDescription:
    """Count the examples of the clients' `parts`, by class if there are labels of shape (n,).

    Args:
        partition: the partition.
        parts: indices of each client.
        labels: class of each example; None without labels.
        classes: names of the labels; without them the classes are 0..max(labels).
        names: names of the clients.
    """
    divided = parts if isinstance(parts, ClientParts) else ClientParts.of(parts)
    counts: list[int] = divided.sizes.tolist()
    if labels is None or len(counts) > MOST_HISTOGRAMS:
        return PartitionDescription(partition.description, counts, None, names=names)
    number = max(int(labels.max()) + 1, len(classes or ()))
    if int(labels.min()) < 0 or number * len(counts) > MOST_NUMBERS:  # no classes 0, 1, …
        return PartitionDescription(partition.description, counts, None, names=names)
    # A single histogram over pairs (client, class), each encoded as a number.
    together = torch.bincount(divided.owners * number + labels, minlength=number * len(counts))
    histograms: list[list[int]] = together.view(-1, number).tolist()
    of_classes = (
        list(classes)
        if classes is not None and len(classes) == number
        else list(map(str, range(number)))
    )
    return PartitionDescription(partition.description, counts, histograms, of_classes, names)
