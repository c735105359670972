"""Servers that each own a range of keys; workers that push gradients and pull weights."""
