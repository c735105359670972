"""Mesh: ranks arranged along three axes, each for another kind of division.

    rank = (data index x pipeline + pipeline index) x tensor + tensor index

    data      groups of ranks that store the same parameters and see different examples
    pipeline  groups that store the stages of a model
    tensor    groups that store the parts of the same layers. They communicate most and have
              consecutive ranks, so that they share a host if launchers fill hosts one after another

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dure.arguments import at_least, check_ranges
from dure.collectives.group import Group

Axis = Literal["data", "pipeline", "tensor"]
AXES: tuple[Axis, ...] = ("data", "pipeline", "tensor")


class Coordinates(NamedTuple):
    """Position of a rank on the mesh: its index along each axis."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """Degrees: the number of ranks along each axis.

    data: ranks that divide each batch. pipeline: ranks that store stages of the model. tensor:
    ranks that divide its layers.

    Raises ValueError for degrees below 1.
    """

    data: int = field(default=1, metadata=at_least(1))
    pipeline: int = field(default=1, metadata=at_least(1))
    tensor: int = field(default=1, metadata=at_least(1))

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor

    @property
    def degrees(self) -> tuple[int, ...]:
        """Number of ranks along each axis, in the order of `AXES`."""
        return self.data, self.pipeline, self.tensor

    def __str__(self) -> str:
        return f"data {self.data} x pipeline {self.pipeline} x tensor {self.tensor}"

    def check(self, workers: int) -> None:
        """Raise ValueError unless the mesh has as many ranks as there are workers."""
        if self.size != workers:
            raise ValueError(
                f"{self} are {self.size} ranks, but the world has {workers}: choose degrees whose "
                f"product is {workers}, or {self.size} workers"
            )

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of a rank on the mesh."""
        # the tensor index runs fastest, so that neighbours have consecutive ranks
        rest, tensor = divmod(rank, self.tensor)
        return Coordinates(*divmod(rest, self.pipeline), tensor)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at a position: the inverse of `coordinates`."""
        return (at.data * self.pipeline + at.pipeline) * self.tensor + at.tensor

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ along `axis` alone, each as a list."""
        place = AXES.index(axis)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)
            # Ranks that agree in the other two coordinates form a group, in order of rank, and so
            # of the index along the axis.
            found.setdefault((*at[:place], *at[place + 1 :]), []).append(rank)
        return list(found.values())

    def check_hosts(self, hosts: Sequence[int]) -> None:
        """Raise ValueError if tensor neighbours do not share a host.

        hosts: the host of each rank, by number.
        """
        for ranks in self.groups("tensor"):
            if len({hosts[rank] for rank in ranks}) > 1:
                names = ", ".join(map(str, ranks))
                raise ValueError(
                    f"ranks {names} divide the same layers but are on different hosts, so every "
                    "layer would wait for the network: choose a tensor degree that divides the "
                    "ranks of each host"
                )

    def table(self) -> str:
        """Return a table of ranks: rows by data and pipeline index, columns by tensor index."""
        rows = [["", *(f"tensor {index}" for index in range(self.tensor))]]
        for data in range(self.data):
            for stage in range(self.pipeline):
                row = [f"data {data}, stage {stage}"]
                for tensor in range(self.tensor):
                    row.append(f"rank {self.rank(Coordinates(data, stage, tensor))}")
                rows.append(row)
        columns = [_padded(column) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _padded(cells: Sequence[str]) -> list[str]:
    """Return all cells padded to the length of the longest cell."""
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


@dataclass(frozen=True)
class Groups:
    """Groups of a rank on a mesh; a group along an axis of degree 1 has size 1."""

    at: Coordinates
    data: Group
    pipeline: Group
    tensor: Group

    def at_step(self, step: str) -> None:
        """Set the step that errors of later operations name."""
        for group in (self.data, self.pipeline, self.tensor):
            group.step = step


def groups_on(mesh: Mesh, group: Group) -> Groups:
    """Return the groups of this rank; all ranks of `group` call it together."""
    # In the order of AXES on every rank: making a group is a collective operation.
    made = {
        axis: group.split_into(mesh.groups(axis), connected=axis == "pipeline") for axis in AXES
    }
    return Groups(
        at=mesh.coordinates(group.rank),
        data=made["data"],
        pipeline=made["pipeline"],
        tensor=made["tensor"],
    )
