"""Pictures of a run folder in the page: PNG files as data URIs.

A folder is untrusted data: a file that is no picture of that folder, or is too large, is left out.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from dure.record.untrusted_files import contents

_NAME = re.compile(r"\d{3}\.png")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LARGEST = 1_000_000
"""Most bytes of a picture."""


def picture_in(folder: Path, name: object) -> str | None:
    """Return the file as a data URI; None if the folder has no such picture."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    path = folder / name
    try:
        content = contents(path, most=_LARGEST)
    except OSError:
        return None
    if not content.startswith(_SIGNATURE):
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
