"""Divide one model's work over ranks: one system a file."""
