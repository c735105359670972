"""Ranged vector clock: number of updates of each worker, for ranges of keys.

A vector clock for each key would be as large as the model. Workers push ranges, so neighbouring
keys have equal times, and a whole segment shares a set of times:

    set(R, worker, t):   a segment within R gets t
                         a segment that R cuts is split at R's ends first

A set adds at most two segments. Times count the pushes of a worker that the keys contain, so the
clock detects duplicate pushes.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", algorithm
2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence


class RangedClock:
    """Times of workers over the keys start … stop-1; initially 0."""

    def __init__(self, start: int, stop: int) -> None:
        self._starts = [start]
        self._stop = stop
        self._times: list[dict[int, int]] = [{}]

    def set(self, start: int, stop: int, worker: int, time: int) -> None:
        """Set the worker's time over start … stop-1 to `time`."""
        for segment in range(self._split(start), self._split(stop)):
            self._times[segment][worker] = time

    def least(self, start: int, stop: int, worker: int) -> int:
        """Return the worker's least time over the keys start … stop-1."""
        return min(times.get(worker, 0) for times in self._over(start, stop))

    def most(self, start: int, stop: int, worker: int) -> int:
        """Return the worker's greatest time over the keys start … stop-1."""
        return max(times.get(worker, 0) for times in self._over(start, stop))

    def segments(self) -> Iterator[tuple[int, int, dict[int, int]]]:
        """Yield (start, stop, times) of each segment, in order; the segments cover all keys."""
        ends = [*self._starts[1:], self._stop]
        yield from zip(self._starts, ends, map(dict, self._times), strict=True)

    def _over(self, start: int, stop: int) -> Sequence[dict[int, int]]:
        """Return the times of the segments that intersect start … stop-1."""
        first = bisect_left(self._starts, start + 1) - 1
        return self._times[first : bisect_left(self._starts, stop)]

    def _split(self, key: int) -> int:
        """Split a segment at `key` if needed.

        Returns the number of the segment that begins there.
        """
        at = bisect_left(self._starts, key)
        begins = at < len(self._starts) and self._starts[at] == key
        if not begins and key < self._stop:
            self._starts.insert(at, key)
            self._times.insert(at, dict(self._times[at - 1]))
        return at

    def state(self) -> list[list[object]]:
        """Return the segments, for checkpoints and replicas."""
        return [[start, stop, times] for start, stop, times in self.segments()]

    def restore(self, state: Sequence[Sequence[object]]) -> None:
        """Restore the segments from `state`."""
        self._starts = [start for start, _, _ in state]  # type: ignore[misc]
        self._stop = state[-1][1]  # type: ignore[assignment]
        self._times = [dict(times) for _, _, times in state]  # type: ignore[call-overload]
