"""The clients of a federation."""
