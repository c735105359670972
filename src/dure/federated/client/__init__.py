"""The client half of a federation."""
