"""The server sees the sum of what clients send, and nothing of any of them."""
