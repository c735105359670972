"""Groups of ranks on two hosts: shared memory within each, one connection between them."""
