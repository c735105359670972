"""Bucket sizes by measurement: some steps are timed, and those are taken that have ended them
earliest.

In six steps short and long buckets take turns; one before them, in which connections find their
pace, does not count. When gradients are ready is known from the hooks. What a message costs
the link, alpha + beta·n seconds for n bytes, is fitted to the all-reduces as they ran beside
backward, and what it takes from the cores, gamma, follows from how much longer backward was with
more of them. From that follow the buckets that should end a step earliest
(`dure.parallel.data.buckets.end_of`); rank 0 suggests them to all. Two more steps are timed with
these, unless they were, and all ranks take them if no other buckets were clearly better: a
suggestion that came of a disturbed measurement is not followed.

Of all that is measured the least of all tries counts. A rank that enters an all-reduce early waits
for the others, so the least of all ranks is what it took; but where messages are sent ahead, it
takes who enters late as much less as who is early more, and the mean of the ranks is right. There,
too, a message takes the cores some ten microseconds, and what lengthens backward is how many bytes
travel beside it: gamma is none.

Only sums whose bits do not depend on where buckets end are measured: a clock never changes a
result.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dure.collectives.group import Group
from dure.parallel.data.buckets import (
    ALL,
    LIMIT,
    LONG,
    Cost,
    Kind,
    Plan,
    cost_of_messages,
    end_of,
    filled,
)

if TYPE_CHECKING:
    from dure.parallel.data.reducer import Transfer

TRIED = (LIMIT // 4, 2 * LIMIT)
"""Limits of the buckets that are timed, in bytes."""

TRIALS = 6

CHECKS = 2

BETTER = 0.95
"""What was suggested is taken unless another has ended its steps in less than this share of the
time."""

LIMITS = (
    LIMIT // 8,
    LIMIT // 4,
    LIMIT // 2,
    *(LIMIT * size for size in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)),
    ALL,
)
"""What rank 0 suggests one of."""


class Trials:
    """The steps that are timed, on one rank. long: as in `filled`. ahead: whether messages are sent
    ahead."""

    def __init__(
        self, kinds: Sequence[Kind], order: Sequence[int], long: int = LONG, ahead: bool = False
    ) -> None:
        self.kinds, self.order, self.long, self.ahead = kinds, order, long, ahead
        self.plans = [filled(kinds, order, size, long) for size in TRIED]
        self._suggestion: Plan | None = None
        self._begun = False
        self._ready: list[list[float]] = []
        self._rows: list[list[float]] = []

    @property
    def worth_it(self) -> bool:
        """Whether there is anything to choose."""
        short, longer = (len(plan.buckets) for plan in self.plans[: len(TRIED)])
        return short > longer

    def plan(self) -> Plan:
        """What the next step tries."""
        return self.plans[_tried(len(self._rows))]

    def note(
        self, ready: Sequence[float], transfers: Sequence[Transfer], start: float, computed: float
    ) -> None:
        """A step was timed: backward from `start` to `computed`. ready: seconds from its start to
        each gradient."""
        if not self._begun:
            self._begun = True
            return
        seconds = [0.0] * len(self.plan().buckets)
        for transfer in transfers:
            if transfer.number < len(seconds):
                seconds[transfer.number] = transfer.end - transfer.start
        end = max([computed, *(transfer.end for transfer in transfers)])
        self._ready.append(list(ready))
        self._rows.append([end - start, computed - start, *seconds])

    def go_on(self, group: Group) -> bool:
        """Whether there is more to try; all ranks ask together, when they have noted a step."""
        if len(self._rows) == TRIALS:
            self._suggestion = self._suggested(group)
            self.plans += [self._suggestion] if self._suggestion not in self.plans else []
        return len(self._rows) < TRIALS + CHECKS * (len(self.plans) - len(TRIED))

    def best(self, group: Group) -> Plan:
        """What is suggested, unless the steps of another plan have ended clearly earlier on the
        slowest rank.

        All ranks call it together, when there is no more to try.
        """
        assert self._suggestion is not None
        ranks = group.all_gather_values([row[0] for row in self._rows], "agreement on buckets")
        steps = [max(ends) for ends in zip(*ranks, strict=True)]
        ends = [
            min(end for step, end in enumerate(steps) if _tried(step) == tried)
            for tried in range(len(self.plans))
        ]
        ends[self.plans.index(self._suggestion)] *= BETTER
        return self.plans[ends.index(min(ends))]

    def _suggested(self, group: Group) -> Plan:
        """The plan of rank 0, from what all ranks have measured."""
        gathered = group.all_gather_values([value for row in self._rows for value in row])
        cost = self.cost([self._rows_of(values) for values in gathered])
        steps = self._ready[1 :: len(TRIED)]
        steps = [
            ready for ready in steps if any(ready)
        ] or steps  # a rank without examples has no times
        ready = [min(times) for times in zip(*steps, strict=True)]
        number = group.all_gather_values([float(self.limit(ready, cost))], "agreement on buckets")[
            0
        ][0]
        return filled(self.kinds, self.order, int(LIMITS[int(number)]), self.long)

    def _rows_of(self, values: Sequence[float]) -> list[list[float]]:
        rows, start = [], 0
        for row in self._rows:
            rows.append(list(values[start : start + len(row)]))
            start += len(row)
        return rows

    def cost(self, ranks: Sequence[Sequence[Sequence[float]]]) -> Cost:
        """What messages cost. ranks: of each rank, of each trial, the seconds to the end of the
        step, to that of backward, and of each message."""
        samples: list[tuple[float, float]] = []
        backward: list[float] = []
        over_ranks = statistics.fmean if self.ahead else min
        for tried, plan in enumerate(self.plans[: len(TRIED)]):
            trials = [list(rows[tried :: len(TRIED)]) for rows in ranks]
            backward.append(max(min(row[1] for row in rows) for rows in trials))
            for number, bucket in enumerate(plan.buckets):
                least = min(
                    over_ranks([row[2 + number] for row in rows])
                    for rows in zip(*trials, strict=True)
                )
                samples.append(
                    (float(sum(self.kinds[member].nbytes for member in bucket.members)), least)
                )
        more = len(self.plans[0].buckets) - len(self.plans[1].buckets)
        gamma = 0.0 if self.ahead else max(0.0, (backward[0] - backward[1]) / more)
        return Cost(*cost_of_messages(samples), gamma)

    def limit(self, ready: Sequence[float], cost: Cost) -> int:
        """The index of the limit whose plan ends first; of those that end alike the one with the
        longest buckets."""
        messages = len(self.plans[1].buckets)
        last = max(ready) or 1.0  # a rank without examples has no times
        alone = [
            time - cost.gamma * messages * time / last for time in ready
        ]  # as if nothing had been sent
        ends = [
            end_of(filled(self.kinds, self.order, int(limit), self.long), self.kinds, alone, cost)
            for limit in LIMITS
        ]
        return max(number for number, end in enumerate(ends) if end <= 1.001 * min(ends))


def _tried(step: int) -> int:
    """The number of the plan that a step tries."""
    return step % len(TRIED) if step < TRIALS else len(TRIED)
