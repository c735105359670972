"""How ranks reduce together: an algorithm is a file."""
