"""The server: who is there, what waits for whom, what has arrived."""
