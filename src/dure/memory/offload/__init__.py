"""Offloading of memory that a step needs only at times, to files or from a GPU to CPU memory."""
