"""Per-example gradients: their norms, and the sum of the clipped gradients."""
