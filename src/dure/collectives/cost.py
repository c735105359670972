"""What an all-reduce costs: messages, bytes, and the time that follows from them.

Messages and bytes come from the algorithms' own formulas.

A link has alpha seconds for a transfer that is waited for, beta for a byte that is sent, gamma for
a byte that is reduced, and an overhead for every message. Where each rank has a machine of its own,
only what happens one after another counts, the critical path (n bytes, N ranks, k = ceil(log2 N), P
the power of two below N):

    algorithm         waits    bytes                 reduced
    ring              2(N-1)   2(N-1)/N·n            (N-1)/N·n
    one_shot          2        2(N-1)/N·n            (N-1)/N·n
    hierarchical      2        2(N-1)/N·n            (N-1)/N·n          on one host it is one_shot
    halving_doubling  2·log2 P 2(P-1)/P·n            (P-1)/P·n          N > P: 2 waits, 2n, n more
    tree              2k       2k·n                  k·n
    master            2(N-1)   2(N-1)·n              (N-1)·n

    seconds = waits·alpha + messages·overhead + bytes·beta + reduced·gamma

where messages are those that the busiest rank sends. On a `shared` host there is no such thing as a
path: ranks take turns on few cores, and everything they send passes through one memory and one
kernel. Waits, messages and bytes are then those of all ranks together, as if one after another;
alpha is the price of putting a rank to sleep and waking it. Only reducing is still counted on the
path, for a master adds while all others sleep. Ranks that are given all their messages at once
(one_shot) wait once for them: that is why alpha and overhead are two numbers.

`fit` finds the four numbers from measured times. They hold for one backend, number of ranks and
number of cores; a `Calibration` keeps them in a file of the machine.

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
"""Those whose cost is known."""

CANDIDATES = tuple(name for name, rule in PREDICTABLE.items() if not rule.over_hosts)
"""Those that are worth comparing on one host."""


@dataclass(frozen=True)
class Link:
    """What carries the bytes. All in seconds.

    alpha: a transfer that is waited for. beta: a byte sent. gamma: a byte reduced. overhead: a
    message, waited for or not. shared: whether all ranks share one host, whose work adds up.
    """

    alpha: float
    beta: float
    gamma: float
    overhead: float = 0.0
    shared: bool = False


class Counts(NamedTuple):
    """What the time is made of: transfers waited for, messages, bytes sent, bytes reduced."""

    waits: float
    messages: float
    sent: float
    reduced: float


class Sample(NamedTuple):
    """One measured all-reduce."""

    algorithm: str
    nbytes: int
    ranks: int
    seconds: float


class Crossover(NamedTuple):
    """From `nbytes` on `after` is predicted to be faster than `before`."""

    nbytes: int
    before: str
    after: str


def bytes_sent(algorithm: str, nbytes: int, ranks: int, rank: int, itemsize: int = 4) -> int:
    """Bytes that `rank` sends, exactly: the formula of the algorithm's file."""
    return _rule(algorithm).elements_sent(nbytes // itemsize, ranks, rank) * itemsize


def messages_sent(algorithm: str, nbytes: int, ranks: int, rank: int, itemsize: int = 4) -> int:
    """Messages that `rank` sends, exactly."""
    return _rule(algorithm).messages_sent(nbytes // itemsize, ranks, rank)


def counts(
    algorithm: str, nbytes: int, ranks: int, shared: bool = False, itemsize: int = 4
) -> Counts:
    """What is counted on the critical path, or on a shared host. nbytes: of each rank's tensor."""
    rule = _rule(algorithm)
    n = nbytes // itemsize
    if ranks == 1 or n == 0:
        return Counts(0, 0, 0, 0)
    # By rank, since some send more than others: the busiest counts, or all together.
    messages = [messages_sent(algorithm, nbytes, ranks, rank, itemsize) for rank in range(ranks)]
    assert rule.path is not None  # or it would not be predictable
    path, reduced = rule.path(n, ranks)
    if not shared:
        return Counts(rule.rounds(ranks), max(messages), path * itemsize, reduced * itemsize)
    # A rank waits at most once a round, however many messages it sends in it.
    sent = sum(bytes_sent(algorithm, nbytes, ranks, rank, itemsize) for rank in range(ranks))
    return Counts(
        min(sum(messages), ranks * rule.rounds(ranks)), sum(messages), sent, reduced * itemsize
    )


def _rule(algorithm: str) -> AllReduce:
    """What the algorithm declares. Raises ValueError where its cost is not known."""
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"the cost of {algorithm!r} is not known; choose one of {', '.join(ALGORITHMS)}"
        )
    return PREDICTABLE[algorithm]


def predict(algorithm: str, nbytes: int, ranks: int, link: Link) -> float:
    """Seconds of one all-reduce. Raises ValueError for an algorithm whose cost is not known."""
    waits, messages, sent, reduced = counts(algorithm, nbytes, ranks, link.shared)
    return waits * link.alpha + messages * link.overhead + sent * link.beta + reduced * link.gamma


def best(nbytes: int, ranks: int, link: Link, algorithms: Sequence[str] = CANDIDATES) -> str:
    """The algorithm that is predicted to be fastest; of equals the first."""
    times = {name: predict(name, nbytes, ranks, link) for name in algorithms}
    # Equal but for rounding counts as equal: then the order of the table decides.
    limit = min(times.values()) * (1 + 1e-9)
    return next(name for name in algorithms if times[name] <= limit)


def crossovers(
    ranks: int,
    link: Link,
    algorithms: Sequence[str] = CANDIDATES,
    low: int = 1 << 10,
    high: int = 1 << 30,
) -> list[Crossover]:
    """The sizes from which on another algorithm is best, to one element.

    low, high: bytes, between which they are looked for.
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
            # Between two sizes there may lie more than one change.
            then = best(above, ranks, link, algorithms)
            found.append(Crossover(above, now, then))
            now = then
        size = above
    return found


def fit(samples: Iterable[Sample], shared: bool = False) -> Link:
    """The link that explains measured times best: least squares of the relative errors.

    No number is below zero.

    Take samples of at least two algorithms and sizes, small and large. With a machine for each rank
    no sample tells beta from gamma, since each of these algorithms sends twice what it reduces:
    gamma is in beta then, and 0 itself. To reduce a byte is taken to cost no more than to send it,
    whatever noise says. Raises ValueError without samples.
    """
    rows = [(counts(s.algorithm, s.nbytes, s.ranks, shared), s.seconds) for s in samples]
    if not rows:
        raise ValueError("there is nothing to fit: give measured samples")
    # Each row divided by its time: the wanted result is 1, and errors are relative, so that long
    # times do not drown short ones.
    matrix = np.array([np.divide(counted, seconds) for counted, seconds in rows], dtype=float)
    waits, messages, sent, reduced = _nonnegative(matrix)
    # Then both prices are one, of a byte that is sent or reduced, and it is fitted again.
    if reduced > sent:
        together = np.column_stack([matrix[:, :2], matrix[:, 2] + matrix[:, 3]])
        waits, messages, sent = _nonnegative(together)
        reduced = sent
    return Link(
        alpha=float(waits),
        beta=float(sent),
        gamma=float(reduced),
        overhead=float(messages),
        shared=shared,
    )


def _nonnegative(matrix: Any) -> Any:
    """x without negative numbers, so that matrix·x is nearest to ones.

    It is the best of all ways to set some x to zero.
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
    """The links of one machine, by (backend, ranks, cores)."""

    links: dict[tuple[str, int, int], Link] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """What was kept in `path`; empty if there is no such file, or it cannot be read."""
        try:
            entries = msgspec.json.decode(Path(path).read_bytes())["links"]
            return cls(
                {(e.pop("backend"), e.pop("ranks"), e.pop("cores")): Link(**e) for e in entries}
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()  # it is a cache: a new fit writes it anew

    def save(self, path: str | Path) -> None:
        """Keeps the links in `path`, as JSON."""
        entries = [
            {"backend": backend, "ranks": ranks, "cores": cores, **asdict(link)}
            for (backend, ranks, cores), link in sorted(self.links.items())
        ]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            Path(path), msgspec.json.format(msgspec.json.encode({"links": entries})) + b"\n"
        )

    def link(self, backend: str, ranks: int, cores: int) -> Link:
        """The link of this backend and number of cores.

        For as many ranks, or the nearest number that was measured.

        Raises ValueError if nothing was measured.
        """
        known = [key for key in self.links if key[0] == backend and key[2] == cores]
        if not known:
            raise ValueError(
                f"no cost of {backend} on {cores} cores is known: dure bench all-reduce --fit "
                f"measures it"
            )
        return self.links[
            # Nearest by ratio: 8 is as near to 4 as 2 is. Of equals the smaller.
            min(known, key=lambda key: (max(key[1], ranks) / min(key[1], ranks), key[1]))
        ]

    def predictor(self, backend: str, cores: int) -> Callable[[str, int, int], float]:
        """predict(algorithm, nbytes, ranks) by these links, for `all_reduce(..., predict=...)`."""
        return lambda algorithm, nbytes, ranks: predict(
            algorithm, nbytes, ranks, self.link(backend, ranks, cores)
        )
