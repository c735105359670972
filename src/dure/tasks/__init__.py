"""Ready-made tasks, and the computations of losses, metrics and gradients for any task."""
