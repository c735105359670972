"""A federation over a network: a server, and clients that come and go."""
