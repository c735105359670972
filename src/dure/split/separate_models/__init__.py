"""Split learning with head and tail in separate files, each run without the other's code."""
