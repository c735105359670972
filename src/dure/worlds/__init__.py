"""Worlds: the processes and machines of a run, and how they communicate; independent of systems."""
