"""Division of a model's work over ranks, with a module for each system."""

from dure.parallel.data.distributed import DistributedDataParallel
from dure.parallel.zero.redundancy import ZeroRedundancy

__all__ = ["DistributedDataParallel", "ZeroRedundancy"]
