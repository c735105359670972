"""All-reduce by recursive halving and doubling: the bytes of a ring in a logarithm of steps.

N = 2^k ranks: in step s = 0 … k-1 rank r exchanges with the rank whose number differs in bit s.
Both have the same window of the tensor; each sends a half and receives and adds the other: the rank
whose bit is 0 keeps the lower half. After k steps every rank has the complete sum of a window of
n/N elements. The same steps backwards double the windows until all ranks have the whole result.
Nearest ranks exchange the most.

Any other N is folded to the next lower power of two, 2^k = N - e: of the first 2e ranks the even
ranks send their whole tensor to the next odd rank, pause, and get the result at the end.

Cost: 2·log2 N messages a rank and about 2(N-1)/N·n elements; folding adds two transfers of n
elements, which is why a ring sends less if N is not a power of two. `elements_sent` is exact.
Scratch: half a tensor, or a whole tensor if folded. Every window is summed once, as in a tree, and
then copied: all ranks have the same bits.

Source: Rabenseifner 2004, "Optimization of Collective Reduction Operations"; Thakur et al. 2005.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.group import Group
from dure.collectives.operation import SUM, Reduction


class HalvingStep(NamedTuple):
    """Exchange with `partner`: this rank keeps the window `keep`, the partner gets `give`.

    Windows are (start, end) in elements.
    """

    partner: int
    keep: tuple[int, int]
    give: tuple[int, int]


def power_below(size: int) -> int:
    """Return the largest power of two that is at most N."""
    return 1 << (size.bit_length() - 1)


def folds_into(size: int, rank: int) -> int | None:
    """Return the odd rank that represents an even rank of the first 2e; None for other ranks."""
    return rank + 1 if rank < 2 * (size - power_below(size)) and rank % 2 == 0 else None


def folded(size: int, rank: int) -> int | None:
    """Return the rank that this rank represents, if any."""
    return rank - 1 if rank > 0 and folds_into(size, rank - 1) == rank else None


def schedule(n: int, size: int, rank: int) -> list[HalvingStep]:
    """Return the steps of the halving; the doubling is the same list reversed.

    Empty for a folded rank.
    """
    power = power_below(size)
    extra = size - power
    if folds_into(size, rank) is not None:
        return []
    # Participating ranks are renumbered: of the first 2e ranks only the odd ranks count.
    number = rank // 2 if rank < 2 * extra else rank - extra
    start = 0
    end = n
    steps = []
    distance = 1
    while distance < power:
        other = number ^ distance
        middle = start + (end - start) // 2
        lower = (start, middle)
        upper = (middle, end)
        # The partner keeps the window that this rank gives, since the bit differs. The step has the
        # partner's rank, not its renumbered position.
        keep, give = (upper, lower) if number & distance else (lower, upper)
        steps.append(HalvingStep(2 * other + 1 if other < extra else other + extra, keep, give))
        start, end = keep
        distance *= 2
    return steps


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """Reduce over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    n = flat.numel()
    representative = folds_into(group.size, group.rank)
    if representative is not None:
        group.send(flat, representative)
        group.receive(flat, representative)
        return
    stands_for = folded(group.size, group.rank)
    steps = schedule(n, group.size, group.rank)
    # The larger half of the first window, or a whole tensor of the rank that is folded.
    scratch = torch.empty(
        n if stands_for is not None else (n + 1) // 2, dtype=flat.dtype, device=flat.device
    )
    if stands_for is not None:
        group.receive(scratch, stands_for)
        reduction.combine(flat, scratch, flat)
    mine = flat
    for partner, keep, give in steps:
        mine = flat[slice(*keep)]
        part = scratch[: mine.numel()]
        group.exchange(flat[slice(*give)], partner, part, partner)
        reduction.combine(mine, part, mine)
    # `mine` is the only window that this rank completes; all others arrive finished.
    reduction.finish(mine)
    for partner, keep, give in reversed(steps):
        group.exchange(flat[slice(*keep)], partner, flat[slice(*give)], partner)
    if stands_for is not None:
        group.send(flat, stands_for)


def sends(n: int, size: int, rank: int) -> list[int]:
    """Return the length of every message that `rank` sends, in order."""
    if folds_into(size, rank) is not None:
        return [n] if n else []
    windows = [window for _, keep, give in schedule(n, size, rank) for window in (give, keep)]
    lengths = [end - start for start, end in windows] + [n] * (folded(size, rank) is not None)
    return [length for length in lengths if length]


def elements_sent(n: int, size: int, rank: int) -> int:
    """Return the elements that `rank` sends.

    Both halves of every window that it halves, and n for a rank that is folded into it.
    """
    return sum(sends(n, size, rank))


def messages_sent(n: int, size: int, rank: int) -> int:
    """Return the messages that `rank` sends: two a step, and another to a rank folded into it."""
    return len(sends(n, size, rank))


def rounds(size: int) -> int:
    """Return the sequential transfers: 2·log2 N, and two more if N is folded."""
    power = power_below(size)
    return 2 * (power.bit_length() - 1) + 2 * (size > power)


def path(n: int, size: int) -> tuple[float, float]:
    """Return `even_path` among P ranks, the largest power of two that is at most N.

    If N is folded, the whole tensor travels before and after in addition.
    """
    power = power_below(size)
    halved = n * (power - 1) / power
    folded = n if size > power else 0
    return 2 * (halved + folded), halved + folded


ALL_REDUCE = AllReduce(
    name="halving_doubling",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=path,
)
