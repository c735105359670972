"""The libraries that a server of a network needs, looked for before any work."""

from __future__ import annotations

import importlib.util

NEEDS = (
    "cryptography",
    "httptools",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "uvloop",
    "websockets",
)
"""The libraries of the extra "deploy"."""


def check_installed() -> None:
    """Raises ValueError where what a network needs is not installed."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a network needs the extra, of which {', '.join(missing)} is missing: pip install "
            f'"dure[deploy]"'
        )
