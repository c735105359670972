"""Whether the libraries of an extra are installed here, asked before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def check_extra(what: str, extra: str, needs: Sequence[str]) -> None:
    """Raises ValueError where a library of an extra is not installed.

    what: needs it, in words. needs: the names under which the libraries are imported.
    """
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{what} needs the extra, of which {', '.join(missing)} is missing: pip install "
            f'"dure[{extra}]"'
        )
