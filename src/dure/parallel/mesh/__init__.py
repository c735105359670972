"""Data, pipeline and tensor parallelism on a mesh of ranks, and meshes with a single axis."""
