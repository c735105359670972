"""Split learning over a network: messages between the server and clients, as bytes."""
