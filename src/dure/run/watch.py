"""Runs that go on, seen in a browser: by `dure watch`, and at the status listener of a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dure.contracts.page import Page
from dure.errors import RunFolderError

PULSE = 0.5
"""Seconds between two looks at whether all is over."""


def page_of(
    folder: Path,
    token: str,
    where_token: str,
    secure: bool,
    server: Callable[[], Mapping[str, Any]],
) -> Page:
    """The live page of the run in a folder, for a server's listener. Raises ImportError."""
    # Not before it is wanted: most runs show no page.
    from dure.report.live.page import LivePage

    return LivePage([folder], token, where_token, secure=secure, server=server)


def watch(
    folders: Sequence[Path],
    port: int = 0,
    linger: float | None = None,
    tell: Callable[[str, str], None] = lambda url, code: None,
) -> None:
    """Shows the report of runs at a loopback address while they go on, whoever trains them.

    folders: run folders, comparisons, or folders in which runs will be. port: 0 takes any. linger:
    seconds for which the page stays once nothing is to come; None: until KeyboardInterrupt. tell:
    hears the address, and the code that opens it.

    Raises RunFolderError where there is no such folder, ImportError without plotly, ServeError.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}")
    from dure.report.live.door import new_code
    from dure.report.live.listener import Listener
    from dure.report.live.page import LivePage

    code = new_code()
    page = LivePage(list(folders), code, "It is in the terminal of dure watch.")
    with closing(Listener(page, port)) as listener:
        tell(listener.url, code)
        over: float | None = None
        while over is None or linger is None or time.monotonic() - over < linger:
            time.sleep(PULSE)
            # Only where somebody waits for it: nobody else needs to be looked for.
            if linger is not None and over is None and page.states.newest().over:
                over = time.monotonic()
