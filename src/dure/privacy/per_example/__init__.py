"""Gradients of single examples: their norms, and the sum of the clipped ones."""
