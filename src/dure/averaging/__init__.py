"""Training with separate weights that are averaged: parallel SGD, local SGD, DiLoCo, ADMM."""
