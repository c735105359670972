"""The loss and the metrics over the batches of a rank, and over those of all ranks.

    loss, pairs    a sum and a count, added over batches, then in order of rank, and divided
    SumMetric      sums of any shape, added in the same way, finished by a single rank
    functions      called by a single rank, on all outputs and targets in the order of the examples

That rank, the first with measured examples, sends the results to the others: all ranks get the same
numbers to the last bit, and make the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.contracts.metric import ratio
from dure.contracts.own_loss import OwnLoss
from dure.contracts.task import Task
from dure.tasks.gathered_outputs import GatheredOutputs, gathering_error, on_cpu
from dure.tasks.loss_shares import loss_and_count
from dure.tasks.metric_state import MetricState
from dure.tasks.sums import MetricSums


class Measurement:
    """Measurements of a rank; `values` combines those of all ranks.

    Args:
        task: loss and metrics.
        examples: number of examples of all ranks together.
        share: number of consecutive examples of this rank; shares are in order of rank.
        counts: False if another rank measures the same examples: this rank computes along, since
            they may compute together, and its results are dropped.
    """

    def __init__(self, task: Task, examples: int, share: int, counts: bool = True) -> None:
        self.task = task
        self.examples = examples
        self.share = share
        self.counts = counts
        self.measured = 0
        self.loss = (0.0, 0.0)
        self.tallies = [MetricState(name, metric) for name, metric in task.measures.items()]
        self._only: tuple[Any, Any] | None = None
        """Outputs and targets of a batch that has all examples."""

    def add(self, outputs: Any, targets: Any, count: int) -> None:
        """Measure the next batch, of `count` examples."""
        total, counted = loss_and_count(self.task.loss, outputs, targets, count)
        self.loss = (self.loss[0] + total, self.loss[1] + counted)
        if isinstance(self.task.loss, OwnLoss) and isinstance(outputs, Mapping):
            # The loss is one number a batch, and no output of an example.
            outputs = {name: one for name, one in outputs.items() if name != "loss"}
        for tally in self.tallies:
            tally.add(outputs, targets)
        if not self.counts:
            return
        self.measured += count
        if count == self.examples:
            self._only = (outputs, targets)
        elif any(tally.waits for tally in self.tallies):
            self._kept.add(outputs, targets, count)

    @cached_property
    def _kept(self) -> GatheredOutputs:
        waiting = [tally.name for tally in self.tallies if tally.waits]
        return GatheredOutputs(self.share, self.examples, self.task.metric_memory, waiting)

    def sums(self) -> dict[str, MetricSums]:
        """Return this rank's sums of the loss and of every summed metric, by name."""
        told = {tally.name: tally.told() for tally in self.tallies}
        return {
            "loss": MetricSums(list(self.loss)),
            **{name: sums for name, sums in told.items() if sums is not None},
        }

    def values(self, group: Group) -> dict[str, float]:
        """Return the loss and every metric over all examples, by name. Collective."""
        names = [tally.name for tally in self.tallies]
        loss, found = self._alone() if group.size == 1 else self._together(group)
        return {"loss": loss, **dict(zip(names, found, strict=True))}

    def _alone(self) -> tuple[float, list[float]]:
        whole = self._mine() if any(tally.waits for tally in self.tallies) else None
        return ratio(*self.loss), self._numbers([tally.sums for tally in self.tallies], whole)

    def _together(self, group: Group) -> tuple[float, list[float]]:
        counts, sizes = self._agreed(group)
        root = next(rank for rank, count in enumerate(counts) if count)
        loss, *sums = self._added(group, sizes)
        if not sums:
            return ratio(*loss.tolist()), []
        whole = None
        if 0 in sizes and self.measured:
            alone = self.measured == self.examples
            whole = self._mine() if alone else self._kept.gathered(group, counts, root)
        # Other ranks contribute zeros.
        found = self._numbers(sums, whole) if group.rank == root else [0.0] * len(sums)
        told = group.all_gather_values(found, "metrics, which one rank computes")
        return ratio(*loss.tolist()), told[root]

    def _agreed(self, group: Group) -> tuple[list[int], list[int]]:
        """Return (number of measured examples of each rank, number of sums of each metric).

        Raises ValueError, on all ranks, if the kind of a metric or an output differs between ranks.
        """
        keeps = any(tally.waits for tally in self.tallies) and self._only is None
        alike = self._kept.fingerprint() if self.measured and keeps else 0.0
        mine = [float(self.measured), alike, *(float(tally.size) for tally in self.tallies)]
        rows = group.all_gather_values(mine)
        told = [row for row in rows if row[0]]
        sizes = [int(size) for size in told[0][2:]]
        for row in told[1:]:
            self._check_alike(sizes, row[2:])
            if row[1] != told[0][1]:
                names = [
                    tally.name for tally, size in zip(self.tallies, sizes, strict=True) if not size
                ]
                raise gathering_error(names, "they have different shapes on different ranks")
        return [int(row[0]) for row in rows], sizes

    def _check_alike(self, sizes: Sequence[float], others: Sequence[float]) -> None:
        for tally, one, other in zip(self.tallies, sizes, others, strict=True):
            if one != other:
                here = f"; here {tally.failure}" if tally.failure is not None else ""
                raise ValueError(
                    f"the metric {tally.name!r} returns different things on different ranks: "
                    f"numbers, pairs, or sums of different shapes{here}"
                )

    def _added(self, group: Group, sizes: Sequence[int]) -> list[Tensor]:
        """Return the sums over all ranks, in order of rank: the loss's, then each metric's."""
        shape = [2, *sizes]
        mine = torch.zeros(sum(shape), dtype=torch.float64)
        if self.measured:
            of_loss = torch.tensor(self.loss, dtype=torch.float64)
            torch.cat([of_loss, *(tally.sums for tally in self.tallies)], out=mine)
        rows = group.all_gather_values(mine.tolist())
        added = torch.zeros_like(mine)
        for row in rows:
            added += torch.tensor(row, dtype=torch.float64)
        return list(torch.split(added, shape))

    def _mine(self) -> tuple[Any, Any]:
        """Return this rank's measured outputs and targets, on the CPU."""
        if self._only is not None:
            return on_cpu(self._only[0]), on_cpu(self._only[1])
        return self._kept.trees()

    def _numbers(self, sums: Sequence[Tensor], whole: tuple[Any, Any] | None) -> list[float]:
        """Return every metric. sums: of all ranks; whole: outputs and targets, or None."""
        found = []
        for tally, of_it in zip(self.tallies, sums, strict=True):
            if not tally.waits:
                found.append(tally.finished(of_it))
                continue
            assert whole is not None
            only = self._only is not None
            found.append(tally.of_the_first(*whole) if only else tally.of_all(*whole))
        return found
