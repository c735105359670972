"""What is learned from: examples in memory, readers of published file formats, partitions over
clients."""
