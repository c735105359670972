"""Bucket sizes by measurement: some steps are timed, and the plan follows that would have ended them earliest.

In four steps short and long buckets take turns. When gradients are ready is known from the hooks. What a message costs,
alpha + beta·n seconds for n bytes, is fitted to the all-reduces as they ran beside backward; the least of all ranks
counts, since the others only waited for the last one, and the least of both tries. `merged` then makes the plan, on
rank 0 for all.

Only sums whose bits do not depend on where buckets end are measured: a clock never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from dure.collectives.group import Group
from dure.parallel.buckets import LIMIT, LONG, Kind, Plan, cost_of_messages, cut, filled, merged

if TYPE_CHECKING:
    from dure.parallel.reducer import Transfer

SIZES = (LIMIT // 4, 2 * LIMIT)
"""Limits of the buckets that are tried, in bytes."""

TRIALS = 4

LEAST_ALPHA = 1e-3
"""Seconds that a message costs at least, in a plan: what the link does not show are the threads of both ends, which
take the cores from backward. With 15 MB in messages of 4 KB to 1 MB, steps were as fast with 8 messages as with 14, and
a tenth slower with 35."""


class Trials:
    """The steps that are timed, on one rank."""

    def __init__(self, kinds: Sequence[Kind], order: Sequence[int], long: int = LONG) -> None:
        self.kinds, self.order, self.long = kinds, order, long
        self.plans = [filled(kinds, order, size, long) for size in SIZES]
        self._ready: list[list[float]] = []
        self._seconds: list[list[float]] = []

    @classmethod
    def of(cls, kinds: Sequence[Kind], order: Sequence[int], long: int = LONG) -> Trials | None:
        """None where there is nothing to choose: little to send, or gradients that cannot share buckets."""
        trials = cls(kinds, order, long)
        alike = len({(kind.dtype, kind.device) for kind in kinds}) == 1
        return trials if alike and len(trials.plans[0].buckets) > 1 else None

    def plan(self) -> Plan:
        """What the next step tries."""
        return self.plans[len(self._seconds) % len(self.plans)]

    def note(self, ready: Sequence[float], transfers: Sequence[Transfer]) -> None:
        """A step was timed. ready: seconds from the begin of backward to each gradient."""
        self._ready.append([ready[index] for index in self.order])
        seconds = [0.0] * len(self.plan().buckets)
        for transfer in transfers:
            if transfer.number < len(seconds):
                seconds[transfer.number] = transfer.end - transfer.start
        self._seconds.append(seconds)

    def go_on(self) -> bool:
        """Whether there is more to try."""
        return len(self._seconds) < TRIALS

    def decide(self, group: Group) -> Plan:
        """The plan of rank 0, from what all ranks have measured; all ranks call it together."""
        counts = [len(seconds) for seconds in self._seconds]
        rows = group.all_gather_values([value for seconds in self._seconds for value in seconds])
        least = [min(values) for values in zip(*rows, strict=True)]
        samples: list[tuple[float, float]] = []
        for number, plan in enumerate(self.plans):
            starts = [sum(counts[:trial]) for trial in range(number, len(counts), len(self.plans))]
            tries = [least[start : start + len(plan.buckets)] for start in starts]
            samples += zip(self._bytes(plan), (min(values) for values in zip(*tries, strict=True)), strict=True)
        alpha, beta = cost_of_messages(samples)
        alpha = max(alpha, LEAST_ALPHA)
        ready = [sorted(times)[len(times) // 2] for times in zip(*self._ready, strict=True)]
        ready = list(accumulate(ready, max))  # the order of one step is not quite that of another
        cuts = merged(self.kinds, self.order, ready, alpha, beta)
        cuts += [0] * (len(self.order) - len(cuts))
        agreed = group.all_gather_values([float(count) for count in cuts], "agreement on buckets")[0]
        return cut(self.kinds, self.order, [int(count) for count in agreed if count], self.long)

    def _bytes(self, plan: Plan) -> list[float]:
        return [float(sum(self.kinds[member].nbytes for member in bucket.members)) for bucket in plan.buckets]
