"""Ends of a contender as processes that are told what to do, so that contenders can take turns.

Both ends say a line when they are there, and hear the other's line; then one of them is told
numbers, a line each time, and says what it has measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class End:
    """A process of a contender. prefix: what its command begins with, to run on another host."""

    def __init__(self, script: str, *words: str, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, str(HERE / script), *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """What it says next. Raises RuntimeError if it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # What libraries print is none of it.
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"{' '.join(map(str, self.process.args))} has ended")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


MARK = "end: "


def tell(what: Any) -> None:
    """From within an end: a line to whoever started it."""
    print(MARK + json.dumps(what), flush=True)


def told() -> Any:
    """From within an end: the next line; None at the end."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None
