"""What is learned, ready made."""
