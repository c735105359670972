"""Training data: examples in memory, readers of file formats, partitions over clients."""
