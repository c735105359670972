"""Training beyond the size of memory: memory-mapped tensors, offloading, recomputation."""
