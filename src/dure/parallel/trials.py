"""Bucket sizes by measurement: some steps are timed, and those are taken that would have ended them earliest.

In four steps short and long buckets take turns. When gradients are ready is known from the hooks. What a message costs
the link, alpha + beta·n seconds for n bytes, is fitted to the all-reduces as they ran beside backward, and what it
takes from the cores, gamma, follows from how much longer backward was with more of them. Of all that is measured the
least of both tries counts; of all-reduces the least of all ranks, since the others only waited for the last one. Rank 0
then chooses for all (`dure.parallel.buckets.end_of`).

Only sums whose bits do not depend on where buckets end are measured: a clock never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dure.collectives.group import Group
from dure.parallel.buckets import ALL, LIMIT, LONG, Cost, Kind, Plan, cost_of_messages, end_of, filled

if TYPE_CHECKING:
    from dure.parallel.reducer import Transfer

TRIED = (LIMIT // 4, 2 * LIMIT)
"""Limits of the buckets that are timed, in bytes."""

TRIALS = 4

LIMITS = (LIMIT // 8, LIMIT // 4, LIMIT // 2, *(LIMIT * size for size in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)), ALL)
"""What rank 0 chooses from."""


class Trials:
    """The steps that are timed, on one rank."""

    def __init__(self, kinds: Sequence[Kind], order: Sequence[int], long: int = LONG) -> None:
        self.kinds, self.order, self.long = kinds, order, long
        self.plans = [filled(kinds, order, size, long) for size in TRIED]
        self._ready: list[list[float]] = []
        self._rows: list[list[float]] = []

    @classmethod
    def of(cls, kinds: Sequence[Kind], order: Sequence[int], long: int = LONG) -> Trials | None:
        """None where there is nothing to choose."""
        trials = cls(kinds, order, long)
        short, longer = (len(plan.buckets) for plan in trials.plans)
        return trials if short > longer else None

    def plan(self) -> Plan:
        """What the next step tries."""
        return self.plans[len(self._rows) % len(self.plans)]

    def note(self, ready: Sequence[float], transfers: Sequence[Transfer], backward: float) -> None:
        """A step was timed. ready: seconds from the begin of backward to each gradient; backward: to its end."""
        seconds = [0.0] * len(self.plan().buckets)
        for transfer in transfers:
            if transfer.number < len(seconds):
                seconds[transfer.number] = transfer.end - transfer.start
        self._ready.append(list(ready))
        self._rows.append([backward, *seconds])

    def go_on(self) -> bool:
        """Whether there is more to try."""
        return len(self._rows) < TRIALS

    def decide(self, group: Group) -> Plan:
        """The plan of rank 0, from what all ranks have measured; all ranks call it together."""
        gathered = group.all_gather_values([value for row in self._rows for value in row])
        cost = self.cost([self._rows_of(values) for values in gathered])
        ready = [min(times) for times in zip(*self._ready[1 :: len(self.plans)], strict=True)]
        number = group.all_gather_values([float(self.best(ready, cost))], "agreement on buckets")[0][0]
        return filled(self.kinds, self.order, int(LIMITS[int(number)]), self.long)

    def _rows_of(self, values: Sequence[float]) -> list[list[float]]:
        rows, start = [], 0
        for row in self._rows:
            rows.append(list(values[start : start + len(row)]))
            start += len(row)
        return rows

    def cost(self, ranks: Sequence[Sequence[Sequence[float]]]) -> Cost:
        """What messages cost. ranks: of each rank, of each trial, the seconds of backward and of each message."""
        samples: list[tuple[float, float]] = []
        backward: list[float] = []
        for tried, plan in enumerate(self.plans):
            trials = [list(rows[tried :: len(self.plans)]) for rows in ranks]
            backward.append(max(min(row[0] for row in rows) for rows in trials))
            for number, bucket in enumerate(plan.buckets):
                least = min(row[1 + number] for rows in trials for row in rows)
                samples.append((float(sum(self.kinds[member].nbytes for member in bucket.members)), least))
        more = len(self.plans[0].buckets) - len(self.plans[1].buckets)
        return Cost(*cost_of_messages(samples), max(0.0, (backward[0] - backward[1]) / more))

    def best(self, ready: Sequence[float], cost: Cost) -> int:
        """The index of the limit whose plan ends first; of those that end alike the one with the longest buckets."""
        messages = len(self.plans[1].buckets)
        last = max(ready) or 1.0  # a rank without examples has no times
        alone = [time - cost.gamma * messages * time / last for time in ready]  # as if nothing had been sent
        ends = [
            end_of(filled(self.kinds, self.order, int(limit), self.long), self.kinds, alone, cost) for limit in LIMITS
        ]
        return max(number for number, end in enumerate(ends) if end <= 1.001 * min(ends))
