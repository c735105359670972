"""Loopback addresses, whose traffic without TLS stays inside this machine.

Servers and clients call the same function to decide whether TLS is optional.
"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether the host is localhost, an address in 127.0.0.0/8, or ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
