"""Train apart, then combine weights: parallel SGD, local SGD, DiLoCo, consensus ADMM."""
