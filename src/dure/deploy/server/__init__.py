"""Server of a federation over a network: sessions of clients, outbox, downloads and uploads."""
