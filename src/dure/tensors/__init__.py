"""Functions on the tensors of a model: flat buffers, copies, comparisons and checks."""
