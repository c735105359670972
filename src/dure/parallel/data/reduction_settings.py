"""Settings of the sum of gradients, and the choices that dure makes.

All-reduces and backward are combined in three ways:

beside       All-reduces run during backward: on a separate thread, on a GPU's stream, or, between
             hosts of one rank each, on threads of the backend. Chosen between hosts, on GPUs, and
             if cores are idle.
split-phase  They start during backward, and are summed by the ranks that start last or have ended
             backward. Chosen if the ranks of one host use all of its cores: no thread takes their
             time, and a rank that would wait for others sums in their place. It needs the backend's
             shared memory and its own all-reduce; elsewhere it is `after`.
after        They run after backward. Chosen if the ranks of one host cannot do better, or if the
             gradients are small.

A bucket has `dure.parallel.data.buckets.LIMIT` bytes unless `bucket_bytes` is given.
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
from dure.parallel.data.buckets import (
    LIMIT,
    LONG,
    NO_BYTE_LIMIT,
    BucketPlan,
    GradientSpec,
    fill_buckets,
)

Overlap = Literal["auto", "beside", "split-phase", "after"]
OverlapMode = Literal["after", "split-phase", "beside"]

OVERLAP_MODES: tuple[OverlapMode, ...] = get_args(OverlapMode)
"""The ways; if ranks choose differently, the last of their choices in this order is used."""

NO_COMPRESSION = NoCompression()

WORTH_IT = 1 << 20
"""Bytes of gradients below which the ranks of one host are faster with a single all-reduce."""


@dataclass(frozen=True)
class ReductionSettings:
    """Settings of the sum of gradients.

    Args:
        algorithm: An algorithm of `all_reduce`.
        op: "sum" or "avg".
        bucket_bytes: Bytes of a bucket; None lets dure choose.
        overlap: A way of the module's docstring; `auto` chooses.
        compression: Compression of buckets.
        static: Whether every step uses the same gradients, so that no flags are needed.
        seed: Seed of compression.

    Raises:
        ValueError: for an unknown algorithm or overlap, or `bucket_bytes` below 1.
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
                f"bucket_bytes is {self.bucket_bytes}, but it has to be 1 or more, or None to let "
                "dure choose"
            )
        if self.overlap not in get_args(Overlap):
            raise ValueError(
                f"overlap is {self.overlap!r}; choose one of {', '.join(get_args(Overlap))}"
            )

    @property
    def compresses(self) -> bool:
        return self.compression.compresses


def bits_depend_on_buckets(
    how: ReductionSettings, group: Group, kinds: Sequence[GradientSpec]
) -> bool:
    """Return whether the bits of the sums depend on the bucket boundaries.

    All ways must then cut alike. The sum of two numbers does not depend on their order. Some
    algorithms add in the order of ranks, or along the same tree, for every element; in a ring each
    chunk begins with another rank.
    """
    # A compressor works on whole buckets, with a seed derived from the bucket's number.
    if how.compresses:
        return True
    if group.size <= 2 or how.algorithm in ("master", "one_shot", "tree", "halving_doubling"):
        return False
    backends_own = how.algorithm in ("native", "auto") and _all_of_dure(group, kinds)
    # On a host dure adds every element in one order, and between two hosts two numbers; with more
    # hosts, or other backends, chunks may begin with different ranks.
    return not (backends_own and len(group.hosts()) <= 2)


def shares_memory(group: Group, kinds: Sequence[GradientSpec]) -> bool:
    """Return whether the ranks read each other's gradients from shared memory."""
    return len(group.hosts()) == 1 and _all_of_dure(group, kinds)


def _all_of_dure(group: Group, kinds: Sequence[GradientSpec]) -> bool:
    """Return whether dure's backend supports the devices of all these gradients."""
    return all(group.backend(kind.device) == "dure" for kind in kinds)


def needs_no_thread(how: ReductionSettings, group: Group, way: OverlapMode) -> bool:
    """Return whether an all-reduce can start before the previous ends, without a thread."""
    planned = how.algorithm == "native" and not how.compresses and native.is_planned(group)
    return way == "split-phase" or (way == "beside" and planned)


def overlap_mode_of(
    how: ReductionSettings, group: Group, kinds: Sequence[GradientSpec]
) -> OverlapMode:
    """Return the way in which all-reduces and backward are combined, from this rank's view."""
    if how.overlap == "split-phase":
        return _in_shared_memory(how, group, kinds)
    if how.overlap != "auto":
        return how.overlap
    if any(kind.device.type != "cpu" for kind in kinds) or len(group.hosts()) > 1:
        return "beside"
    # From here on all ranks share one host and its cores.
    if sum(kind.nbytes for kind in kinds) < WORTH_IT:
        return "after"
    # a core is idle for the thread that sums
    if available_cores() > group.size * torch.get_num_threads():
        return "beside"
    # with a given bucket size there may be more messages than can be in flight
    return _in_shared_memory(how, group, kinds) if how.bucket_bytes is None else "after"


def _in_shared_memory(
    how: ReductionSettings, group: Group, kinds: Sequence[GradientSpec]
) -> OverlapMode:
    """Return split-phase if it is possible, otherwise after."""
    plain = how.algorithm == "native" and not how.compresses
    if plain and shares_memory(group, kinds) and native.is_split_phase(group):
        return "split-phase"
    return "after"


def plan_of(
    how: ReductionSettings,
    kinds: Sequence[GradientSpec],
    order: Sequence[int],
    way: OverlapMode,
    *,
    shared: bool,
    follows: bool,
) -> BucketPlan:
    """Return the buckets of gradients that finish in this order.

    Args:
        how: Settings.
        kinds: Kinds of all gradients.
        order: Indices of the gradients, as they finish.
        way: How all-reduces and backward are combined.
        shared: Whether the ranks share memory, so that no gradient is sent from autograd's memory.
        follows: Whether bits follow the plan, which then depends on sizes alone and not on the way.
    """
    if how.bucket_bytes is not None:
        limit = how.bucket_bytes
    elif way == "split-phase":  # no more messages than can be in flight at once
        limit = max(LIMIT, -(-sum(kind.nbytes for kind in kinds) // UNDER_WAY))
    else:
        # Without overlap a single message is cheapest; but if bits follow the plan, all ways have
        # to cut alike.
        limit = LIMIT if way == "beside" or follows else NO_BYTE_LIMIT
    # With a given bucket size, no shorter gradient has its own bucket.
    long = NO_BYTE_LIMIT if shared else max(LONG, how.bucket_bytes or 0)
    plan = fill_buckets(kinds, order, limit, long)
    # a compressed bucket is not exact, and the trailer has to be
    return replace(plan, carries=False) if how.compresses else plan
