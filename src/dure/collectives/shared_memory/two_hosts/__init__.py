"""Groups of ranks on several hosts: shared memory within each, network connections between them."""
