"""`dure watch RUN`: the report of runs in a browser, live while they are in progress."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dure.cli.flags import names_before_flags, parse_flags

_USAGE = "dure watch RUN [RUN ...]"


@dataclass(frozen=True)
class WatchOptions:
    """Options of the page.

    Args:
        port: port of the page, at 127.0.0.1; by default any free port.
        linger: seconds for which the page stays after all runs have ended; by default until Ctrl-C.
        language: language of the page, en or ko (Korean).
    """

    port: int = 0
    linger: float | None = None
    language: str = "en"


def main(given: list[str]) -> int:
    """Show the page until Ctrl-C, which counts as success."""
    names, flags = names_before_flags(given)
    about = (
        "Show the report of runs in a browser, live while they train, also runs of other processes."
    )
    how: WatchOptions = parse_flags(_USAGE, {"how": WatchOptions}, flags, about)["how"]
    if not names:
        raise ValueError(f"{_USAGE}: name a run folder, or a folder of runs")
    if not 0 <= how.port < 65536:
        raise ValueError(f"port is {how.port}, but ports are 0 to 65535")
    if how.linger is not None and how.linger < 0:
        raise ValueError(f"linger is {how.linger}, but it has to be 0 seconds or more")
    from dure.run.watch import watch

    try:
        watch([Path(name) for name in names], how.port, how.linger, how.language, _tell)
    except KeyboardInterrupt:
        print("dure: the page is closed; the runs continue", file=sys.stderr)
    return 0


def _tell(url: str, code: str) -> None:
    # Separate from the address, so that the code is in no browser history.
    print(f"watch at {url}\ncode     {code}\nCtrl-C closes the page", file=sys.stderr, flush=True)
