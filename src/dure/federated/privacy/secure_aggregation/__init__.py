"""Secure aggregation: the server sees the sum of the clients' updates, and no single update."""
