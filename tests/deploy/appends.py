"""Run by test_journal.py: appends from four threads and prints the seq of what is acknowledged."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from dure.deploy.clock import FederationClock
from dure.deploy.journal import Journal

journal = Journal(Path(sys.argv[1]), FederationClock(), "run")


def append(name: str) -> None:
    for number in range(1 << 30):
        event = journal.write(name, number)
        # One write each: lines of threads do not mix.
        sys.stdout.write(f"{event.seq} {name} {number}\n")
        sys.stdout.flush()


for name in "abcd":
    threading.Thread(target=append, args=(name,)).start()
