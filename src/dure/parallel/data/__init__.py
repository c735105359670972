"""Data parallel: ranks divide each batch."""
