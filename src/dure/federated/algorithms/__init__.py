"""Federated algorithms, one per file: hyperparameters, and hooks of clients and server."""
