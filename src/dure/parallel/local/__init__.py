"""Training of a model on the cores and devices of a single process."""
