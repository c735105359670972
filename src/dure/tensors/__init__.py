"""Tensors of a model as one."""
