"""Split learning: the head of a model is with the data, its tail on a server."""
