"""Formats, keys and signatures of the messages that travel between machines."""
