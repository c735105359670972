"""Collective operations over the point-to-point sends of a group: one algorithm a file."""

from dure.collectives.all_reduce import ALGORITHMS, all_reduce
from dure.collectives.group import Group

__all__ = ["ALGORITHMS", "Group", "all_reduce"]
