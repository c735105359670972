"""Show runs in progress in a browser: `dure watch`, and the status listener of a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dure.contracts.page import Page
from dure.errors import RunFolderError

PULSE = 0.5
"""Seconds between two checks whether all runs have ended."""


def page_of(
    folder: Path,
    token: str,
    where_token: str,
    secure: bool,
    server: Callable[[], Mapping[str, Any]],
) -> Page:
    """Return the live page of the run in a folder, for a server's listener.

    Raises ImportError if plotly is missing.
    """
    # Imported here: most runs show no page, and plotly takes long to load.
    from dure.report.live.page import LivePage

    return LivePage([folder], token, where_token, secure=secure, server=server)


def watch(
    folders: Sequence[Path],
    port: int = 0,
    linger: float | None = None,
    language: str = "en",
    tell: Callable[[str, str], None] = lambda url, code: None,
) -> None:
    """Serve the report of runs in progress at a loopback address, whichever process trains them.

    Args:
        folders: run folders, comparisons, or folders that will contain runs.
        port: TCP port; 0 takes any free port.
        linger: seconds for which the page stays after all runs have ended; None serves until
            KeyboardInterrupt.
        language: of the page, "en" or "ko".
        tell: function that receives the address and the code that unlocks the page.

    Raises:
        ValueError: if the language is unknown.
        RunFolderError: if a folder does not exist.
        ImportError: if plotly is missing.
        ServeError: if the listener cannot start.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}")
    from dure.report.live.listener import Listener
    from dure.report.live.login import new_code
    from dure.report.live.page import LivePage

    code = new_code()
    where = "The terminal of dure watch prints it."
    page = LivePage(list(folders), code, where, language=language)
    with closing(Listener(page, port)) as listener:
        tell(listener.url, code)
        over: float | None = None
        while over is None or linger is None or time.monotonic() - over < linger:
            time.sleep(PULSE)
            # Without `linger` the page never ends by itself, so the states need not be read.
            if linger is not None and over is None and page.states.newest().over:
                over = time.monotonic()
