"""Protection of clients' data, by secure sums and by noise; and attacks on updates."""
