"""Random graph of masking pairs, in which every client has k neighbours, k about log n.

    order        a random permutation of the n members, on a circle
    neighbours   the k / 2 next members on either side (Harary's graph)

A client has masks only with its neighbours. The neighbours hold the shares of its secrets, of which
t reveal a secret. With C corrupt and D dropped members, three events must not occur for any of the
n members:

    an attacker has t shares     n P[H(n - 1, C, k) >= t]         <= 2^-(σ + 1)
    honest graph disconnected    n (n - k - 1) / 2 Π_{i<k} (C + D - i) / (n - i)
                                                                  <= 2^-(σ + 1)
    shares are missing           n P[H(n - 1, n - 1 - D, k) < t]  <= 2^-η

H is hypergeometric: the neighbours are as random as a draw of k of the n - 1 others. The second
line: a circle with k / 2 neighbours on either side becomes disconnected only by two gaps of k / 2
members each that are corrupt or dropped, and there are n (n - k - 1) / 2 pairs of places for gaps.
If the honest graph is disconnected, the server sees the sum of each component. The event of the
third line costs a round, not a secret. Corrupt members tell the server all they know and follow the
protocol, as the server does: against a malicious server no such graph is enough (the paper's other
variant).

The plan is the smallest k for which a threshold t exists, and the middle one of these t. Some
degrees (σ = 40, η = 20), equal to those of the authors' program:

    members               100   1,000   10,000   100,000   1,000,000
    C 33 %, D 33 %         68     286      422       480         518
    C 5 %, D 33 %          28      72       86        96         102

Cost of a round: a client k + 1 masks and k agreements, the server n (k + 1) masks at worst and n
secrets of t shares: O(n log n) instead of O(n^2).

Source: J. H. Bell, K. A. Bonawitz, A. Gascón, T. Lepoint and M. Raykova, "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead", CCS 2020, section 3; the degrees above:
google-parfait/federated-compute, fcp/secagg/server/graph_parameter_finder.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from dure.randomness.keystream import permutation

FEW = 40
"""Largest number of members for which all pairs are neighbours without a search.

In so small a group a fraction bounds the number of corrupt members badly, and a graph saves little.
"""


class GraphPlan(NamedTuple):
    """Degree of the graph, and threshold: the number of shares that reveal a secret."""

    degree: int
    threshold: int


def neighbours(members: int, degree: int, key: bytes) -> list[list[int]]:
    """Return the neighbours of each member, ascending; the relation is symmetric.

    `degree` is even, or members - 1 for all pairs. `key` has 32 bytes and determines the order.
    Raises ValueError for other degrees.
    """
    if degree == members - 1:
        return [[other for other in range(members) if other != one] for one in range(members)]
    if not 2 <= degree < members or degree % 2:
        raise ValueError(
            f"a graph of {members} members with {degree} neighbours each: the degree has to be "
            f"even and below {members}, or {members - 1}"
        )
    order = permutation(key, members)
    steps = [step for step in range(-degree // 2, degree // 2 + 1) if step]
    found: list[list[int]] = [[] for _ in range(members)]
    for place, member in enumerate(order):
        found[member] = sorted(order[(place + step) % members] for step in steps)
    return found


def plan(
    members: int, corrupt: float, drop_out: float, sigma: float = 40, eta: float = 40
) -> GraphPlan:
    """Return the smallest secure degree, and the threshold.

    Args:
        members: n.
        corrupt: fraction of corrupt members; the number is rounded up.
        drop_out: fraction of dropped members; the number is rounded down.
        sigma: privacy fails with probability at most 2^-sigma.
        eta: a round with no more dropouts fails with probability at most 2^-eta.

    Raises ValueError if no graph is enough.
    """
    if members < 3:
        raise ValueError(
            f"a sum has {members} members, but needs at least 3 to hide each member's part from "
            "the others"
        )
    if not (0 <= corrupt < 1 and 0 <= drop_out < 1):
        raise ValueError(
            f"the fractions are {corrupt} corrupt and {drop_out} lost, but each has to be in [0, 1)"
        )
    # 0.1 · 30 must give 3 in spite of float64 rounding.
    bad = math.ceil(corrupt * members - 1e-9)
    lost = math.floor(drop_out * members + 1e-9)
    # A single share must not reveal a secret: the threshold is at least 2.
    if members > FEW:
        for degree in range(2, members - 1, 2):
            if _log2_apart(members, degree, bad + lost) > -(sigma + 1):
                continue
            most_known = max(1, _quantile(members, bad, degree, -(sigma + 1)))
            fewest_there = degree - _quantile(members, lost, degree, -eta)
            if most_known < fewest_there:
                return _between(degree, most_known, fewest_there)
    most_known = max(1, bad)
    fewest_there = members - 1 - lost
    if most_known >= fewest_there:
        raise ValueError(
            f"of {members} members {bad} may be corrupt and {lost} lost: no threshold satisfies "
            "both; assume fewer, or select more clients"
        )
    return _between(members - 1, most_known, fewest_there)


def _between(degree: int, most_known: int, fewest_there: int) -> GraphPlan:
    """Return the plan with the threshold in the middle of most_known + 1 to fewest_there."""
    return GraphPlan(degree, (most_known + 1 + fewest_there) // 2)


def _log2_apart(members: int, degree: int, gone: int) -> float:
    """Return log2 of the bound on the probability that the remaining graph is disconnected."""
    if gone < degree:
        return -math.inf
    pairs = members * (members - degree - 1) / 2
    all_gone = (
        math.lgamma(gone + 1)
        - math.lgamma(gone - degree + 1)
        + math.lgamma(members - degree + 1)
        - math.lgamma(members + 1)
    )
    return math.log2(pairs) + all_gone / math.log(2)


def _quantile(members: int, marked: int, degree: int, log2_bound: float) -> int:
    """Return the smallest m that bounds the marked neighbours of every member.

    The bound fails for some member with probability at most 2^log2_bound.
    """
    tails = _log2_tails(members - 1, min(marked, members - 1), degree)
    enough = np.flatnonzero(tails[1:] + math.log2(members) <= log2_bound)
    return int(enough[0])


def _log2_tails(population: int, marked: int, drawn: int) -> Any:
    """Return log2 P[H >= m] for m of 0 to drawn + 1, with H = H(population, marked, drawn)."""
    count = torch.arange(drawn + 1, dtype=torch.float64)
    logs = (
        _log_binomial(marked, count)
        + _log_binomial(population - marked, drawn - count)
        - _log_binomial(population, torch.tensor(float(drawn), dtype=torch.float64))
    ).numpy()
    # Logarithms are summed from the small end, so that a tail of 2^-40 is as exact as one of 1/2.
    tails = np.logaddexp.accumulate(logs[::-1])[::-1] / math.log(2)
    return np.append(np.minimum(tails, 0.0), -math.inf)


def _log_binomial(n: int, k: torch.Tensor) -> torch.Tensor:
    inside = (k >= 0) & (k <= n)
    some = k.clamp(0, n)
    top = torch.tensor(float(n), dtype=torch.float64)
    logs = torch.lgamma(top + 1) - torch.lgamma(some + 1) - torch.lgamma(top - some + 1)
    return torch.where(inside, logs, -math.inf)
