"""What clients and the server of a federation do: an algorithm is a file."""
