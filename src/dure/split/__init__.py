"""Split learning: the head of a model is at the data, its tail on a server."""
