"""What keeps clients' data from the server and from others: sums alone, noise; and attacks."""
