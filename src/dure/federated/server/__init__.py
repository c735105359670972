"""The server half of a federation."""
