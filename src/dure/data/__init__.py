"""What is learned from: examples in memory, readers of file formats, partitions over clients."""
