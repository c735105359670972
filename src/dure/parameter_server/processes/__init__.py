"""Servers and workers as operating-system processes: transport and main loops."""
