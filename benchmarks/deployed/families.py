"""Processes with all that they have started: what memory they take together, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

EVERY = 0.25
"""Seconds between two looks at the memory."""

LEAVE = 10.0
"""Seconds in which a family may end by itself, once it was asked to."""


class Known(NamedTuple):
    """A process. began: in ticks since the machine's start, so that no other one is meant."""

    pid: int
    began: int


def _living() -> dict[int, tuple[int, int]]:
    """Of every process that has not ended: its parent, and when it began."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):
            # The name may hold anything, and ends with the last bracket.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[int(entry.name)] = int(fields[1]), int(fields[19])
    return found


def family(roots: Sequence[int]) -> list[Known]:
    """These processes and all below them, as far as they live."""
    living = _living()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in living.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, Known] = {}
    left = list(roots)
    while left:
        pid = left.pop()
        if pid in living and pid not in found:
            found[pid] = Known(pid, living[pid][1])
            left += children.get(pid, ())
    return list(found.values())


def resident(pid: int) -> int:
    """Bytes of a process that lie in memory; those that it shares count in part (PSS)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


class Memory:
    """Looks again and again at what a server and its clients take, each with its family."""

    def __init__(self, server: int, clients: Sequence[int]) -> None:
        self._pids = server, clients
        self._server = self._all = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(EVERY):
            server, clients = self._pids
            of_server = sum(resident(one.pid) for one in family([server]))
            of_clients = sum(resident(one.pid) for one in family(clients))
            self._server = max(self._server, of_server)
            self._all = max(self._all, of_server + of_clients)
            # Where something has failed, nobody asks for the peaks.
            if not of_server + of_clients:
                return

    def peaks(self) -> dict[str, int]:
        """Bytes at the most, seen at the looks until now. Looks no more."""
        self._over.set()
        self._thread.join()
        return {"peak_bytes_of_server": self._server, "peak_bytes_of_all": self._all}


@contextmanager
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list whose processes are ended with their families: asked first, and killed then."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        left = family([one.pid for one in started])
        for one in started:
            one.terminate()
        left = _outlive(left, started)
        for member in left:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        _outlive(left, started)
        for one in started:
            one.wait()


def _outlive(known: list[Known], started: Sequence[subprocess.Popen[bytes]]) -> list[Known]:
    """Those that live on after `LEAVE` seconds, and whom they have started since."""
    until = time.monotonic() + LEAVE
    while known and time.monotonic() < until:
        time.sleep(0.05)
        for one in started:
            one.poll()
        living = _living()
        left = [one for one in known if one.pid in living and living[one.pid][1] == one.began]
        known = list({*left, *family([one.pid for one in left])})
    return known
