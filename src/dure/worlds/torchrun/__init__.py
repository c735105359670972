"""The ranks that torchrun has started, on many machines."""
