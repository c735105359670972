"""Addresses that only this machine reaches: there, what travels without TLS is read by nobody else.

Servers and clients ask the same function whether they may do without TLS.
"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether the host is localhost, or an address in 127.0.0.0/8, or ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
