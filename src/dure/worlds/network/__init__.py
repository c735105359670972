"""Clients on machines of their own, and the server that they reach over a network."""
