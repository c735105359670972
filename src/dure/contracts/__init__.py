"""Interfaces between tasks, strategies, learners and worlds."""
