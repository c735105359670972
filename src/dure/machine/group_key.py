"""Key by which the hosts of a job authenticate each other: `DURE_KEY`, the same text on all hosts.

The key is never written anywhere, in particular not to the job's store, which is readable by
everyone on the network. In a process without the key, hosts trust the store's content.
"""

from __future__ import annotations

import hashlib
import os

VARIABLE = "DURE_KEY"


def group_key() -> bytes | None:
    """Return the SHA-256 of the text, 32 bytes; None without a text."""
    text = os.environ.get(VARIABLE, "")
    return hashlib.sha256(text.encode()).digest() if text else None
