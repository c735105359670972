"""Differential privacy: noise, and the accounting of its guarantee."""
