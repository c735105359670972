"""Check that the libraries of an extra are installed, before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def check_extra(what: str, extra: str, needs: Sequence[str]) -> None:
    """Raise ValueError if a library of an extra is not installed.

    what: the feature that needs the extra, for the message. needs: import names of the libraries.
    """
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{what} needs the extra, of which {', '.join(missing)} is missing: pip install "
            f'"dure[{extra}]"'
        )
