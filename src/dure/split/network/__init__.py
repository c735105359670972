"""Split learning over a network: what the server and clients say, as bytes."""
