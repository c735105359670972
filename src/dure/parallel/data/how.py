"""How gradients are summed: the settings, and what dure chooses where they leave it open.

beside       all-reduces run while backward goes on, on a thread (a GPU: on a stream; between hosts of one rank each: on
             threads of the backend alone): between hosts, on GPUs, and where cores are idle
split-phase  they are begun while backward goes on, and summed by ranks that begin last or are
through with backward:
             where the ranks of one host keep all of its cores busy. Nobody takes their time, and
             who would wait for others sums what they have not. Without the backend's shared memory,
             and with an all-reduce or a compression of one's own, it is `after`
after        they run when backward is done, in one message: where the ranks of one host cannot do better, or the
             gradients are few
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from dure.collectives.algorithms import native
from dure.collectives.all_reduce import ALGORITHMS, Algorithm
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.group import Group
from dure.collectives.shared_memory.native import UNDER_WAY
from dure.parallel.data.buckets import ALL, LIMIT, LONG, Kind, Plan, filled

Overlap = Literal["auto", "beside", "split-phase", "after"]
Way = Literal["after", "split-phase", "beside"]

WAYS: tuple[Way, ...] = get_args(Way)
"""Where ranks would choose differently the last of theirs counts."""

NO_COMPRESSION = NoCompression()

WORTH_IT = 1 << 20
"""Bytes of gradients below which, on one host, it takes longer to hand on parts of them than to add
them at once."""


@dataclass(frozen=True)
class How:
    """How gradients are summed.

    algorithm: of `all_reduce`. op: "sum" or "avg". bucket_bytes: None lets dure choose. overlap:
    `auto` chooses among the ways above. static: the same gradients are used in every step, which
    then needs no flags. seed: of compression.
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
        return not isinstance(self.compression, NoCompression)


def bits_follow_the_plan(how: How, group: Group, kinds: Sequence[Kind]) -> bool:
    """Whether the bits of the sums depend on where buckets end, so that a clock must not choose the
    buckets.

    Two numbers have the same sum in any order. Some algorithms add in the order of ranks, or along
    the same tree, for every element; a ring begins each chunk with another rank.
    """
    if how.compresses:
        return True
    if group.size <= 2 or how.algorithm in ("master", "one_shot", "tree", "halving_doubling"):
        return False
    own = how.algorithm in ("native", "auto") and all(
        group.backend(kind.device) == "dure" for kind in kinds
    )
    return not (own and len(group.hosts()) <= 2)


def shares_memory(group: Group, kinds: Sequence[Kind]) -> bool:
    """Whether the ranks read each other's gradients from memory that they share."""
    return len(group.hosts()) == 1 and all(group.backend(kind.device) == "dure" for kind in kinds)


def needs_no_thread(how: How, group: Group, way: Way) -> bool:
    """Whether nobody here has to wait for an all-reduce before the next one is begun."""
    planned = how.algorithm == "native" and not how.compresses and native.is_planned(group)
    return way == "split-phase" or (way == "beside" and planned)


def way_of(how: How, group: Group, kinds: Sequence[Kind]) -> Way:
    """How all-reduces and backward go together, as far as this rank can tell."""
    plain = how.algorithm == "native" and not how.compresses
    shared: Way = (
        "split-phase"
        if plain and shares_memory(group, kinds) and native.is_split_phase(group)
        else "after"
    )
    if how.overlap != "auto":
        return shared if how.overlap == "split-phase" else how.overlap
    if any(kind.device.type != "cpu" for kind in kinds) or len(group.hosts()) > 1:
        return "beside"
    if sum(kind.nbytes for kind in kinds) < WORTH_IT:
        return "after"
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    idle = cores > group.size * torch.get_num_threads()
    return "beside" if idle else shared if how.bucket_bytes is None else "after"


def first_plan(
    how: How, kinds: Sequence[Kind], order: Sequence[int], way: Way, shared: bool, follows: bool
) -> Plan:
    """The buckets before anything is measured.

    shared: whether the ranks share memory, in which no gradient stays where it is. follows: whether
    bits follow the plan, which then depends on sizes alone.
    """
    if way == "split-phase":  # as many as can be under way
        limit = how.bucket_bytes or max(LIMIT, -(-sum(kind.nbytes for kind in kinds) // UNDER_WAY))
    else:
        limit = how.bucket_bytes or (LIMIT if way == "beside" or follows else ALL)
    return filled(kinds, order, limit, ALL if shared else max(LONG, how.bucket_bytes or 0))
