"""Quota on the files that a server makes a client store: models, states, updates, log lines.

The quota sums the sizes of the existing files before each new file, so that a restarted client
counts the files of earlier processes. Keys, approvals, rosters and the list of spent models are
small, protect the site, and are not counted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dure.errors import PolicyError

COPIES = 16
"""Default quota as a multiple of the model's size.

It has space for the newest model, the next model in transit, the client's own model, the state of
the algorithm, and updates of unknown outcome, each with the algorithm's additional tensors.
"""

BESIDE = 1 << 28
"""Default quota of the audit log in bytes: the lines of about a million messages."""

_COUNTED = re.compile(
    r"(model|frozen|personal|memory|update)-.*\.safetensors|download-.*|\.tensors\..*"
    r"|audit\.jsonl|evaluations-.*"
)


class Quota:
    """Quota in bytes on the files of a folder. `limit` is None for no quota."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = limit

    def used(self) -> int:
        """Return the bytes of the counted files."""
        with os.scandir(self.folder) as found:
            return sum(
                one.stat(follow_symlinks=False).st_size
                for one in found
                if _COUNTED.fullmatch(one.name)
            )

    def check(self, more: int, what: str) -> None:
        """Raise PolicyError if `more` bytes of `what` would exceed the quota."""
        if self.limit is None:
            return
        used = self.used()
        if used + more > self.limit:
            raise PolicyError(
                f"{what} needs {more:,} bytes in {self.folder}, where {used:,} of {self.limit:,} "
                "are used: set a larger storage in policy.toml if the run needs it"
            )


def default_quota(model: int) -> int:
    """Return the default quota in bytes for a model, frozen weights included, of `model` bytes."""
    return COPIES * model + BESIDE
