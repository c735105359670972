"""A client of a federation over a network: what it does, keeps, allows and tells."""
