"""The plan of an all-reduce benchmark: sizes, ranks, contenders, repetitions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from dure.arguments import at_least, check_ranges
from dure.collectives import ALGORITHMS
from dure.settings import suggestion

Kind = Literal["peer", "algorithm", "backend", "floor"]

KIB = 1 << 10
MIB = 1 << 20
LADDER = tuple(4 * KIB * 4**step for step in range(9))
"""4 KiB to 256 MiB, each four times the previous."""

ALLOWED = range(4, 4 << 30)
"""Valid sizes of a tensor in bytes."""


@dataclass(frozen=True)
class Contender:
    """A contender of the benchmark.

    Args:
        name: name on the command line and in JSON.
        label: name in tables.
        kind: peer, algorithm over gloo, backend of dure, or memory floor.
        what: description in words.
        core: implementation of the sum in the dure backend: C, or the same in torch.
        pooled: whether it reduces a tensor of `empty_shared`, and not an ordinary tensor.
        direct: whether the group's own method is called, and not torch.distributed's function.
    """

    name: str
    label: str
    kind: Kind
    what: str
    core: Literal["c", "torch"] = "c"
    pooled: bool = False
    direct: bool = False

    @property
    def algorithm(self) -> str:
        """Name of the algorithm in `dure.collectives`."""
        return self.name.replace("-", "_")

    def as_json(self) -> dict[str, str]:
        """Return the contender's entry in the result's JSON."""
        return {"name": self.name, "label": self.label, "kind": self.kind, "what": self.what}


PEERS = (
    Contender("gloo", "gloo", "peer", "torch.distributed.all_reduce of a gloo group"),
    Contender("open-mpi", "Open MPI", "peer", "MPI_Allreduce in place on numpy arrays, by mpi4py"),
)

BACKENDS = (
    Contender(
        "dure",
        "dure",
        "backend",
        "torch.distributed.all_reduce of a dure group, tensors of empty_shared",
        pooled=True,
    ),
    Contender(
        "dure-direct",
        "dure, direct",
        "backend",
        "the group's own all_reduce(tensor), tensors of empty_shared",
        pooled=True,
        direct=True,
    ),
    Contender(
        "dure-ordinary",
        "dure, ordinary",
        "backend",
        "torch.distributed.all_reduce, ordinary tensors",
    ),
    Contender(
        "dure-torch",
        "dure in torch",
        "backend",
        "a dure group without the C core, tensors of empty_shared",
        core="torch",
        pooled=True,
    ),
    Contender(
        "dure-torch-ordinary",
        "dure in torch, ordinary",
        "backend",
        "the same with ordinary tensors",
        core="torch",
    ),
)

FLOOR = Contender(
    "memory",
    "memory",
    "floor",
    "every rank scales its tensor in place: each byte read and written once",
)


def _algorithms() -> list[Contender]:
    return [
        Contender(
            name.replace("_", "-"),
            name.replace("_", " "),
            "algorithm",
            f"{name} over the sends of gloo",
        )
        for name in ALGORITHMS
        if name not in ("native", "auto")  # those choose among the others, or are the backend's
    ]


CONTENDERS = {one.name: one for one in (*PEERS, *BACKENDS, *_algorithms(), FLOOR)}
"""Every contender, by name, in the order of tables."""


@dataclass(frozen=True)
class BenchPlan:
    """The plan of a benchmark.

    Args:
        sizes: bytes of the float32 tensor of each rank.
        ranks: numbers of ranks.
        contenders: names of contenders.
        repeats: timed batches per contender and size, of which the median counts.
        batch: least duration of a batch in seconds, which sets its number of calls.
        longest: bound in seconds on a call of an algorithm over gloo; larger sizes are skipped.
    """

    sizes: tuple[int, ...] = LADDER
    ranks: tuple[int, ...] = (2, 4, 8)
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    repeats: int = field(default=5, metadata=at_least(1))
    batch: float = 0.02
    longest: float = 0.6

    def __post_init__(self) -> None:
        for name in self.contenders:
            if name not in CONTENDERS:
                raise ValueError(f"there is no contender {name!r}{suggestion(name, CONTENDERS)}")
        # Checked before ranks are started, in the words of the command line.
        for what, values in (
            ("size", self.sizes),
            ("number of ranks", self.ranks),
            ("contender", self.contenders),
        ):
            if not values:
                raise ValueError(f"give at least one {what} to measure")
            if len(set(values)) < len(values):
                raise ValueError(f"a {what} is given twice: {', '.join(map(str, values))}")
        for size in self.sizes:
            if size not in ALLOWED or size % 4:
                raise ValueError(
                    f"a tensor of {size} bytes cannot be measured: the size has to be 4 bytes to "
                    "4 GiB, of float32"
                )
        for count in self.ranks:
            if count < 2:
                raise ValueError(f"{count} ranks cannot all-reduce: give at least two")
        check_ranges(self)
        # Sizes ascend, since each is judged by the previous size; contenders are in table order.
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))
        object.__setattr__(
            self, "contenders", tuple(name for name in CONTENDERS if name in self.contenders)
        )


def parse_size(text: str) -> int:
    """Return the bytes of "4096", "4K", "64KB", "1M" or "256MiB".

    K and M are powers of 1024, as in nccl-tests. Raises ValueError for malformed text.
    """
    # "64K", "64KB" and "64KiB" are the same.
    found = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write bytes, 64K or 16M")
    # A power of 1024 is a shift by tens of bits.
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]]


def size_text(count: float) -> str:
    """Return bytes in powers of 1024: 4 KiB, 256 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
