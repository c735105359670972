"""Processes of the benchmark: started, listened to, weighed, and ended by their number."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOOK = 0.5
"""Seconds between two looks at whether the others are still there."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class Talking:
    """A process of a program of this folder that says what happens in lines of JSON."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[object],
        python: str = sys.executable,
        before: Any = (),
    ) -> None:
        command = [*before, python, str(HERE / program), *map(str, arguments)]
        self.began = time.time()
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def hears(self, name: str, seconds: float, others: Sequence[Talking] = ()) -> dict[str, Any]:
        """The next line that has this name. Raises RuntimeError where the process ends before, or
        one of the `others`, without which it would wait in vain, fails."""
        until = time.monotonic() + seconds
        while True:
            try:
                left = max(0.0, until - time.monotonic())
                line = self.lines.get(timeout=min(LOOK, left))
            except queue.Empty:
                for other in others:
                    if other.process.poll():
                        raise RuntimeError(f"{other} failed before {name}") from None
                if time.monotonic() < until:
                    continue
                raise RuntimeError(f"no {name} within {seconds} s") from None
            if line is None:
                raise RuntimeError(f"it ended with {self.process.wait()} before {name}")
            if name in line or line.get("event") == name:
                return line

    def __str__(self) -> str:
        return " ".join(map(str, self.process.args))  # type: ignore[arg-type]

    def kill(self) -> None:
        """As a power failure would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def ended() -> Iterator[list[Talking]]:
    """A list whose processes are killed at the end, if they have not ended."""
    started: list[Talking] = []
    try:
        yield started
    finally:
        for one in started:
            if one.process.poll() is None:
                one.kill()
            if one.process.stdout is not None:
                one.process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def memory(pid: int) -> dict[str, int]:
    """Bytes: now, of which anonymous and of which of files, and the peak of all."""
    found = {}
    names = {"VmRSS": "now", "RssAnon": "anonymous", "RssFile": "of_files", "VmHWM": "peak"}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            found[names[name]] = 1024 * int(rest.split()[0])
    return found


class Weighed:
    """Looks at a process's memory, every 10 ms until it has ended. anonymous: the most of it."""

    def __init__(self, pid: int) -> None:
        self.peak = self.anonymous = 0
        self._pid = pid
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            while found := memory(self._pid):
                self.peak = max(self.peak, found["peak"])
                self.anonymous = max(self.anonymous, found["anonymous"])
                time.sleep(0.01)
        except OSError:
            pass

    def ended(self) -> None:
        self._thread.join()
