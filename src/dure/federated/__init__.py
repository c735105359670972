"""Federated learning: a server, and clients that train on local data and send updates."""
