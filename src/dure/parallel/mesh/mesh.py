"""A mesh: ranks arranged along three axes, each of which divides something else.

    rank = (data index x pipeline + pipeline index) x tensor + tensor index

    data      groups of ranks that hold the same parameters and see other examples
    pipeline  groups that hold the stages of one model
    tensor    groups that hold the parts of the same layers: neighbours in rank, for they speak most, so that they share
              a host wherever launchers fill hosts one after another

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from dure.collectives.group import Group

Axis = Literal["data", "pipeline", "tensor"]
AXES: tuple[Axis, ...] = ("data", "pipeline", "tensor")


class Coordinates(NamedTuple):
    """Where a rank is on the mesh."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """The degrees: how many ranks lie along each axis.

    Raises ValueError for degrees below one.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if degree < 1:
                raise ValueError(
                    f"{field.name} is {degree}, but along every axis there is one rank at least"
                )

    @property
    def size(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def degrees(self) -> tuple[int, ...]:
        return self.data, self.pipeline, self.tensor

    def __str__(self) -> str:
        return f"data {self.data} x pipeline {self.pipeline} x tensor {self.tensor}"

    def check(self, workers: int) -> None:
        """Raises ValueError unless the mesh has as many ranks as there are workers."""
        if self.size != workers:
            raise ValueError(
                f"{self} are {self.size} ranks, but the world has {workers}: choose degrees whose "
                f"product is "
                f"{workers}, or {self.size} workers"
            )

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        return Coordinates(*divmod(rest, self.pipeline), tensor)

    def rank(self, at: Coordinates) -> int:
        return (at.data * self.pipeline + at.pipeline) * self.tensor + at.tensor

    def groups(self, axis: Axis) -> list[list[int]]:
        """The ranks that differ along `axis` alone, a list for each group."""
        place = AXES.index(axis)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)
            found.setdefault((*at[:place], *at[place + 1 :]), []).append(rank)
        return list(found.values())

    def check_hosts(self, hosts: Sequence[int]) -> None:
        """Raises ValueError if tensor neighbours do not share a host. hosts: the host of each rank,
        by number."""
        for ranks in self.groups("tensor"):
            if len({hosts[rank] for rank in ranks}) > 1:
                names = ", ".join(map(str, ranks))
                raise ValueError(
                    f"ranks {names} divide the same layers but do not share a host, and would wait "
                    f"for the network in "
                    f"every layer: choose a tensor degree that divides the ranks of each host"
                )

    def table(self) -> str:
        """The ranks for people: a row for each data and pipeline index, a column for each tensor
        index."""
        head = ["", *(f"tensor {index}" for index in range(self.tensor))]
        rows = [
            [f"data {data}, stage {stage}"]
            + [
                f"rank {self.rank(Coordinates(data, stage, tensor))}"
                for tensor in range(self.tensor)
            ]
            for data in range(self.data)
            for stage in range(self.pipeline)
        ]
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in [head, *rows]
        ]
        return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class Groups:
    """The groups of one rank on a mesh; those of one rank have size 1."""

    at: Coordinates
    data: Group
    pipeline: Group
    tensor: Group

    def at_step(self, step: str) -> None:
        """What they do from now on belongs to `step`, for errors."""
        for group in (self.data, self.pipeline, self.tensor):
            group.step = step


def groups_on(mesh: Mesh, group: Group) -> Groups:
    """The groups of this rank; all ranks of `group` call it together."""
    made = {axis: group.parted(mesh.groups(axis)) for axis in AXES}
    return Groups(mesh.coordinates(group.rank), made["data"], made["pipeline"], made["tensor"])
