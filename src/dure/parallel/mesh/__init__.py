"""Data, pipeline and tensor parallelism on one mesh of ranks."""
