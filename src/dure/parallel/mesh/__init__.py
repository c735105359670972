"""Data, pipeline and tensor parallelism on one mesh of ranks, and the meshes of one axis."""
