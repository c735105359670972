"""Data parallelism: ranks divide each batch."""
