"""Cost of an all-reduce: messages, bytes, and the time that follows from them.

Messages and bytes come from the algorithms' own formulas. A link has alpha seconds for a transfer
with a wait, beta for a byte sent, gamma for a byte reduced, and an overhead for every message. If
each rank has a separate machine, only the critical path counts (n bytes, N ranks, k = ceil(log2 N),
P the largest power of two up to N):

    algorithm         waits    bytes                 reduced
    ring              2(N-1)   2(N-1)/N·n            (N-1)/N·n
    one_shot          2        2(N-1)/N·n            (N-1)/N·n
    hierarchical      2        2(N-1)/N·n            (N-1)/N·n          on a single host: one_shot
    halving_doubling  2·log2 P 2(P-1)/P·n            (P-1)/P·n          N > P: 2 waits, 2n, n more
    tree              2k       2k·n                  k·n
    master            2(N-1)   2(N-1)·n              (N-1)·n

    seconds = waits·alpha + messages·overhead + bytes·beta + reduced·gamma

where messages are the messages of the busiest rank. A `shared` host has no critical path: ranks
take turns on few cores, and all their messages pass through the same memory and kernel. Waits,
messages and bytes are then the totals of all ranks, as if sequential; alpha is the price of putting
a rank to sleep and waking it. Only reducing still counts on the path, because a master adds while
all others sleep. Ranks that get all their messages at once (one_shot) wait once for them: for this
reason alpha and overhead are two numbers.

`fit` estimates the four numbers from measured times. They are valid for a backend, a number of
ranks and a number of cores; a `Calibration` stores them in a file of the machine.

Source: Hockney 1994 (alpha and beta), Culler et al. 1993 (LogP: overhead), Thakur et al. 2005 (the
path's formulas).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.algorithms.table import PREDICTABLE
from dure.record.disk import write_atomically

ALGORITHMS = tuple(PREDICTABLE)
"""Algorithms with a known cost."""

CANDIDATES = tuple(name for name, rule in PREDICTABLE.items() if not rule.over_hosts)
"""Algorithms that are worth comparing on a single host."""


@dataclass(frozen=True)
class LinkCost:
    """Costs of the link in seconds.

    alpha: a transfer with a wait. beta: a byte sent. gamma: a byte reduced. overhead: a message,
    with or without a wait. shared: whether all ranks share a host, whose work adds up.
    """

    alpha: float
    beta: float
    gamma: float
    overhead: float = 0.0
    shared: bool = False


class CostTerms(NamedTuple):
    """Terms of the time: transfers with a wait, messages, bytes sent, bytes reduced."""

    waits: float
    messages: float
    sent: float
    reduced: float


class MeasuredAllReduce(NamedTuple):
    """Measured all-reduce."""

    algorithm: str
    nbytes: int
    ranks: int
    seconds: float


class Crossover(NamedTuple):
    """Size in bytes from which `after` is predicted to be faster than `before`."""

    nbytes: int
    before: str
    after: str


def bytes_sent(algorithm: str, nbytes: int, ranks: int, rank: int, itemsize: int = 4) -> int:
    """Return the exact bytes that `rank` sends, by the formula of the algorithm's file."""
    return _rule(algorithm).elements_sent(nbytes // itemsize, ranks, rank) * itemsize


def messages_sent(algorithm: str, nbytes: int, ranks: int, rank: int, itemsize: int = 4) -> int:
    """Return the exact number of messages that `rank` sends."""
    return _rule(algorithm).messages_sent(nbytes // itemsize, ranks, rank)


def counts(
    algorithm: str, nbytes: int, ranks: int, shared: bool = False, itemsize: int = 4
) -> CostTerms:
    """Return the terms on the critical path, or on a shared host.

    nbytes: bytes of each rank's tensor.
    """
    rule = _rule(algorithm)
    n = nbytes // itemsize
    if ranks == 1 or n == 0:
        return CostTerms(0, 0, 0, 0)
    # By rank, since ranks send different amounts: the busiest counts, or the total.
    messages = [messages_sent(algorithm, nbytes, ranks, rank, itemsize) for rank in range(ranks)]
    assert rule.path is not None  # or it would not be predictable
    path, reduced = rule.path(n, ranks)
    if not shared:
        return CostTerms(rule.rounds(ranks), max(messages), path * itemsize, reduced * itemsize)
    # A rank waits at most once a round, however many messages it sends in it.
    sent = sum(bytes_sent(algorithm, nbytes, ranks, rank, itemsize) for rank in range(ranks))
    return CostTerms(
        min(sum(messages), ranks * rule.rounds(ranks)), sum(messages), sent, reduced * itemsize
    )


def _rule(algorithm: str) -> AllReduce:
    """Return the algorithm's declaration. Raises ValueError if its cost is unknown."""
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"the cost of {algorithm!r} is not known; choose one of {', '.join(ALGORITHMS)}"
        )
    return PREDICTABLE[algorithm]


def predict(algorithm: str, nbytes: int, ranks: int, link: LinkCost) -> float:
    """Return the seconds of an all-reduce. Raises ValueError for an algorithm of unknown cost."""
    waits, messages, sent, reduced = counts(algorithm, nbytes, ranks, link.shared)
    return waits * link.alpha + messages * link.overhead + sent * link.beta + reduced * link.gamma


def best(nbytes: int, ranks: int, link: LinkCost, algorithms: Sequence[str] = CANDIDATES) -> str:
    """Return the algorithm with the shortest predicted time; of equal times the first."""
    times = {name: predict(name, nbytes, ranks, link) for name in algorithms}
    # Times equal up to rounding count as equal: then the order of the table decides.
    limit = min(times.values()) * (1 + 1e-9)
    return next(name for name in algorithms if times[name] <= limit)


def crossovers(
    ranks: int,
    link: LinkCost,
    algorithms: Sequence[str] = CANDIDATES,
    low: int = 1 << 10,
    high: int = 1 << 30,
) -> list[Crossover]:
    """Return the sizes from which another algorithm is best, to within an element.

    Args:
        ranks: number of ranks.
        link: costs of the link.
        algorithms: the algorithms to compare.
        low: smallest size in bytes.
        high: largest size in bytes.
    """
    found: list[Crossover] = []
    size = low
    now = best(low, ranks, link, algorithms)
    while size < high:
        # Steps of an eighth, in whole elements of 4 bytes; between two sizes with different winners
        # the change is found by halving.
        above = min(high, size + max(4, size // 8 // 4 * 4))
        then = best(above, ranks, link, algorithms)
        if then != now:
            below = size
            while above - below > 4:
                middle = (below + above) // 2 // 4 * 4
                below, above = (
                    (middle, above)
                    if best(middle, ranks, link, algorithms) == now
                    else (below, middle)
                )
            # There may be several changes between two sizes.
            then = best(above, ranks, link, algorithms)
            found.append(Crossover(above, now, then))
            now = then
        size = above
    return found


def fit(samples: Iterable[MeasuredAllReduce], shared: bool = False) -> LinkCost:
    """Return the link that explains measured times best: least squares of relative errors.

    No number is negative. Take samples of at least two algorithms and sizes, small and large. With
    a machine for each rank no sample separates beta from gamma, since each of these algorithms
    sends twice the bytes that it reduces: gamma is then included in beta, and 0 itself. A byte
    reduced is assumed to cost at most as much as a byte sent, in spite of noise. Raises ValueError
    without samples.
    """
    rows = [(counts(s.algorithm, s.nbytes, s.ranks, shared), s.seconds) for s in samples]
    if not rows:
        raise ValueError("there is nothing to fit: give measured samples")
    # Each row divided by its time: the wanted result is 1, and errors are relative, so that long
    # times do not drown short ones.
    matrix = np.array([np.divide(counted, seconds) for counted, seconds in rows], dtype=float)
    waits, messages, sent, reduced = _nonnegative(matrix)
    # Both prices are then replaced by a single price of a byte sent or reduced, fitted again.
    if reduced > sent:
        together = np.column_stack([matrix[:, :2], matrix[:, 2] + matrix[:, 3]])
        waits, messages, sent = _nonnegative(together)
        reduced = sent
    return LinkCost(
        alpha=float(waits),
        beta=float(sent),
        gamma=float(reduced),
        overhead=float(messages),
        shared=shared,
    )


def _nonnegative(matrix: Any) -> Any:
    """Return the nonnegative x for which matrix·x is nearest to ones.

    The result is the best over all subsets of entries that are set to zero.
    """
    rows, width = matrix.shape
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0  # counts and seconds differ by ten orders of magnitude
    winner = np.zeros(width)
    least = float("inf")
    # Four numbers have 15 subsets: trying all is exact, and needs no iteration.
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(width), k) for k in range(1, width + 1)
    ):
        some = matrix[:, kept] / scale[list(kept)]
        solved = np.linalg.lstsq(some, np.ones(rows), rcond=None)[0]
        error = float(np.square(some @ solved - 1).sum())
        # Fewer numbers come first, and more have to be better by more than rounding.
        if (solved >= 0).all() and error < least - 1e-12:
            winner = np.zeros(width)
            least = error
            winner[list(kept)] = solved
    return winner / scale


@dataclass
class Calibration:
    """Links of a machine, by (backend, ranks, cores)."""

    links: dict[tuple[str, int, int], LinkCost] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Return the links stored in `path`; empty if the file is absent or unreadable."""
        try:
            entries = msgspec.json.decode(Path(path).read_bytes())["links"]
            return cls(
                {(e.pop("backend"), e.pop("ranks"), e.pop("cores")): LinkCost(**e) for e in entries}
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()  # the file is a cache, and a new fit rewrites it

    def save(self, path: str | Path) -> None:
        """Store the links in `path`, as JSON."""
        entries = [
            {"backend": backend, "ranks": ranks, "cores": cores, **asdict(link)}
            for (backend, ranks, cores), link in sorted(self.links.items())
        ]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            Path(path), msgspec.json.format(msgspec.json.encode({"links": entries})) + b"\n"
        )

    def link(self, backend: str, ranks: int, cores: int) -> LinkCost:
        """Return the link of this backend and number of cores.

        The link is for this number of ranks, or the nearest measured number. Raises ValueError
        without a measurement.
        """
        known = [key for key in self.links if key[0] == backend and key[2] == cores]
        if not known:
            raise ValueError(
                f"the cost of {backend} on {cores} cores is unknown: measure it with dure bench "
                "all-reduce --fit"
            )
        return self.links[
            # Nearest by ratio: 8 is as near to 4 as 2 is. Of equals the smaller.
            min(known, key=lambda key: (max(key[1], ranks) / min(key[1], ranks), key[1]))
        ]

    def predictor(self, backend: str, cores: int) -> Callable[[str, int, int], float]:
        """Return predict(algorithm, nbytes, ranks) by these links.

        Its use is `all_reduce(..., predict=...)`.
        """
        return lambda algorithm, nbytes, ranks: predict(
            algorithm, nbytes, ranks, self.link(backend, ranks, cores)
        )
