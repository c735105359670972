"""Bound on what a server makes a client store: models, states of algorithms, updates, log lines.

What is there is counted by the sizes of the files themselves, each time before another one is
written, so a client that was started again knows what earlier ones have left. Keys, approvals,
rosters and the list of what a client has helped to unmask are small, protect the site, and are not
counted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dure.errors import PolicyError

COPIES = 16
"""Of the model that a client may keep where its policy does not say: the newest one, the next one
on its way, the client's own, what an algorithm keeps, and updates of unknown outcome, each with
what an algorithm sends besides."""

BESIDE = 1 << 28
"""Bytes of the log, where the policy does not say: those of about a million messages."""

_COUNTED = re.compile(
    r"(model|frozen|personal|memory|update)-.*\.safetensors|download-.*|\.tensors\..*"
    r"|audit\.jsonl|evaluations-.*"
)


class Quota:
    """A bound on the files of one folder, in bytes. limit: None takes any number."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = limit

    def used(self) -> int:
        """Bytes of the files that count."""
        with os.scandir(self.folder) as found:
            return sum(
                one.stat(follow_symlinks=False).st_size
                for one in found
                if _COUNTED.fullmatch(one.name)
            )

    def check(self, more: int, what: str) -> None:
        """Raises PolicyError where `more` bytes, of `what`, are too many beside those there."""
        if self.limit is None:
            return
        used = self.used()
        if used + more > self.limit:
            raise PolicyError(
                f"{what} would take {more:,} bytes of {self.folder}, where {used:,} of "
                f"{self.limit:,} are used: set a larger storage in policy.toml if the run needs it"
            )


def by_default(model: int) -> int:
    """The bound for a run whose model, with its frozen weights, has so many bytes."""
    return COPIES * model + BESIDE
