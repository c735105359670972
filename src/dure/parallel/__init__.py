"""Divide one model's work over ranks: one system a file."""

from dure.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
