"""Train where the data was born: a server, clients, and updates between them."""
