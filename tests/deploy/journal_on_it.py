"""Run by test_syncing.py on a forgetful disk: appends, and asks after each what the disk has.

Arguments: the folder, and what to leave out: nothing, or "full" (the log is synced at checkpoints
only). Prints a line for every row that was acknowledged and lost.
"""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

from forgetful_disk import what_it_has

from dure.deploy.clock import FederationClock
from dure.deploy.journal import Event, Journal

folder, left_out = Path(sys.argv[1]), sys.argv[2]
luck = random.Random(7)
one_at_a_time = threading.Lock()


def lost() -> None:
    """Fails the power now, twice: with nothing but what was synced, and with more."""
    with one_at_a_time:
        acknowledged = list(told)
        for luckily in (None, luck):
            found = events_in(what_it_has(folder, folder.with_name("found"), luckily))
            for event in acknowledged:
                if event not in found:
                    print("lost", *event, flush=True)


def events_in(place: Path) -> list[Event]:
    again = Journal(place, FederationClock(), "run")
    again.read_from(0)
    found = []
    while again.behind:
        event = again.next()
        assert event is not None
        found.append(event)
    again.close()
    return found


def writes(name: str) -> None:
    for number in range(12):
        told.append(open_journal.write(name, number, body=b"x" * 900 * number))
        lost()


told: list[Event] = []
open_journal = Journal(folder, FederationClock(), "run")
if left_out == "full":
    open_journal._writer.execute("PRAGMA synchronous=NORMAL")
open_journal._writer.execute("PRAGMA wal_autocheckpoint=20")
writes("first")
threads = [threading.Thread(target=writes, args=(f"thread{number}",)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
open_journal.close()
open_journal = Journal(folder, FederationClock(), "run")
lost()
writes("again")
print("wrote", len(told))
