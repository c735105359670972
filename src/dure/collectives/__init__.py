"""Collective operations over the point-to-point sends of a group: one algorithm a file.

Every collective is a function here and has its own module, with its algorithms and the exact
traffic of a rank in each: `elements_sent` and `messages_sent`.
"""

from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import ALGORITHMS, all_reduce
from dure.collectives.all_to_all import all_to_all
from dure.collectives.broadcast import broadcast
from dure.collectives.gather import gather
from dure.collectives.group import Group
from dure.collectives.handle import Handle
from dure.collectives.reduce import reduce
from dure.collectives.reduce_scatter import reduce_scatter
from dure.collectives.scatter import scatter
from dure.collectives.shared_memory.pool import empty_shared

__all__ = [
    "ALGORITHMS",
    "Group",
    "Handle",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "empty_shared",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
