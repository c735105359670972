"""Simulated clients: devices, availability, data over time, and malicious behaviour."""
