"""Training over a network: a server, and clients that join and leave at any time."""
