"""Messages between a federated server and its clients."""
