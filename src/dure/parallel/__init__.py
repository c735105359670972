"""Divide one model's work over ranks: one system a file."""

from dure.parallel.data.distributed import DistributedDataParallel
from dure.parallel.zero.redundancy import ZeroRedundancy

__all__ = ["DistributedDataParallel", "ZeroRedundancy"]
