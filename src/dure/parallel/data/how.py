"""How gradients are summed: the settings, and what dure chooses where they leave it open.

Three ways for all-reduces and backward to go together:

beside       All-reduces run while backward goes on: on a thread of their own, on a GPU's stream,
             or, between hosts of one rank each, on threads of the backend. Chosen between hosts,
             on GPUs, and where cores are idle.
split-phase  They are begun while backward goes on, and summed by the ranks that begin last or have
             ended backward. Chosen where the ranks of one host keep all of its cores busy:
             no thread takes their time, and a rank that would wait for others sums what they have
             not. It needs the backend's shared memory and its own all-reduce; elsewhere it is
             `after`.
after        They run when backward is done. Chosen where the ranks of one host cannot do better, or
             the gradients are few.

A bucket has `dure.parallel.data.buckets.LIMIT` bytes unless `bucket_bytes` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from dure.collectives.algorithms import native
from dure.collectives.all_reduce import ALGORITHMS, Algorithm
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.group import Group
from dure.collectives.shared_memory.native import UNDER_WAY
from dure.machine.cores import available_cores
from dure.parallel.data.buckets import ALL, LIMIT, LONG, Kind, Plan, filled

Overlap = Literal["auto", "beside", "split-phase", "after"]
Way = Literal["after", "split-phase", "beside"]

WAYS: tuple[Way, ...] = get_args(Way)
"""Where ranks would choose differently, the last of their choices counts."""

NO_COMPRESSION = NoCompression()

WORTH_IT = 1 << 20
"""Bytes of gradients below which the ranks of one host are faster when they add all at once."""


@dataclass(frozen=True)
class How:
    """How gradients are summed.

    algorithm: of `all_reduce`. op: "sum" or "avg". bucket_bytes: None lets dure choose. overlap:
    `auto` chooses among the ways above. static: whether the same gradients are used in every step,
    which then needs no flags. seed: of compression.

    Raises ValueError for what there is not.
    """

    algorithm: Algorithm = "native"
    op: Literal["sum", "avg"] = "sum"
    bucket_bytes: int | None = None
    overlap: Overlap = "auto"
    compression: Compression = NO_COMPRESSION
    static: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"there is no all-reduce {self.algorithm!r}; choose one of {', '.join(ALGORITHMS)}"
            )
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(
                f"bucket_bytes is {self.bucket_bytes}: at least 1, or None, and dure chooses"
            )
        if self.overlap not in get_args(Overlap):
            raise ValueError(
                f"overlap is {self.overlap!r}; choose one of {', '.join(get_args(Overlap))}"
            )

    @property
    def compresses(self) -> bool:
        return self.compression.compresses


def bits_follow_the_plan(how: How, group: Group, kinds: Sequence[Kind]) -> bool:
    """Whether the bits of the sums depend on where buckets end, so that all ways must cut alike.

    Two numbers have the same sum in any order. Some algorithms add in the order of ranks, or along
    the same tree, for every element; a ring begins each chunk with another rank.
    """
    # A compressor works on a bucket as a whole, with a seed of the bucket's number.
    if how.compresses:
        return True
    if group.size <= 2 or how.algorithm in ("master", "one_shot", "tree", "halving_doubling"):
        return False
    backends_own = how.algorithm in ("native", "auto") and _all_of_dure(group, kinds)
    # On a host dure adds every element in one order, and between two hosts two numbers; with more
    # hosts, or other backends, chunks may begin with different ranks.
    return not (backends_own and len(group.hosts()) <= 2)


def shares_memory(group: Group, kinds: Sequence[Kind]) -> bool:
    """Whether the ranks read each other's gradients from memory that they share."""
    return len(group.hosts()) == 1 and _all_of_dure(group, kinds)


def _all_of_dure(group: Group, kinds: Sequence[Kind]) -> bool:
    """Whether dure's backend carries all of these gradients."""
    return all(group.backend(kind.device) == "dure" for kind in kinds)


def needs_no_thread(how: How, group: Group, way: Way) -> bool:
    """Whether no rank has to wait for an all-reduce before it begins the next one."""
    planned = how.algorithm == "native" and not how.compresses and native.is_planned(group)
    return way == "split-phase" or (way == "beside" and planned)


def way_of(how: How, group: Group, kinds: Sequence[Kind]) -> Way:
    """How all-reduces and backward go together, as far as this rank can tell."""
    if how.overlap == "split-phase":
        return _in_shared_memory(how, group, kinds)
    if how.overlap != "auto":
        return how.overlap
    if any(kind.device.type != "cpu" for kind in kinds) or len(group.hosts()) > 1:
        return "beside"
    # From here on all ranks share one host and its cores.
    if sum(kind.nbytes for kind in kinds) < WORTH_IT:
        return "after"
    # a core is free for the thread that sums
    if available_cores() > group.size * torch.get_num_threads():
        return "beside"
    # with buckets of a size that was asked for, more messages than can be under way may leave
    return _in_shared_memory(how, group, kinds) if how.bucket_bytes is None else "after"


def _in_shared_memory(how: How, group: Group, kinds: Sequence[Kind]) -> Way:
    """Split-phase, where that is possible."""
    plain = how.algorithm == "native" and not how.compresses
    if plain and shares_memory(group, kinds) and native.is_split_phase(group):
        return "split-phase"
    return "after"


def plan_of(
    how: How, kinds: Sequence[Kind], order: Sequence[int], way: Way, *, shared: bool, follows: bool
) -> Plan:
    """The buckets of gradients that finish in this order.

    shared: whether the ranks share memory, in which no gradient stays where it is. follows: whether
    bits follow the plan, which then depends on sizes alone and not on the way.
    """
    if how.bucket_bytes is not None:
        limit = how.bucket_bytes
    elif way == "split-phase":  # no more messages than can be under way at once
        limit = max(LIMIT, -(-sum(kind.nbytes for kind in kinds) // UNDER_WAY))
    else:
        # Where nothing goes on meanwhile one message is cheapest; but if bits follow the plan all
        # ways have to cut alike.
        limit = LIMIT if way == "beside" or follows else ALL
    # Where buckets of some size were asked for, no shorter gradient leaves alone.
    long = ALL if shared else max(LONG, how.bucket_bytes or 0)
    plan = filled(kinds, order, limit, long)
    # a compressed bucket is not exact, and the tail has to be
    return replace(plan, carries=False) if how.compresses else plan
