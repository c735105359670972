"""Vertical split learning: parties that hold different features of the same people."""
