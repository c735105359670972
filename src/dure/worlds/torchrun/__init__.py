"""World of the ranks that torchrun has started, on one or many machines."""
