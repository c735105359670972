"""Differential privacy of whole clients or persons: what the model tells of any of them."""
