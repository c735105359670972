"""How models and updates travel between machines."""
