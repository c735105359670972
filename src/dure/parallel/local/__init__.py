"""One model on the cores and devices of one process."""
