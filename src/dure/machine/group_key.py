"""The key by which the hosts of a job know each other: `DURE_KEY`, the same text on all of them.

It is never written anywhere, above all not to the job's store, which anybody on the network can
read. In a process that has none, hosts know each other by what the store tells.
"""

from __future__ import annotations

import hashlib
import os

VARIABLE = "DURE_KEY"


def group_key() -> bytes | None:
    """32 bytes made of the text; None where there is none."""
    text = os.environ.get(VARIABLE, "")
    return hashlib.sha256(text.encode()).digest() if text else None
