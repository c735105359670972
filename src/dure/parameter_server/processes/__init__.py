"""Servers and workers as real processes: what carries their messages, and what drives them."""
