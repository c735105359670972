"""Tokens of commands: from standard input or from a file.

Every user of a machine can read the arguments of its processes, so a token should not be among
them.
"""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

STANDARD_INPUT = "-"

_MOST = 4096
"""Most bytes of a token and the end of its line; a token of dure has 32 digits."""


def token_of(token: str, file: Path | None) -> str:
    """Return the token that a command was given; empty without a token.

    Args:
        token: the argument of `--token`, a token or `-`.
        file: the argument of `--token-file`: a file, a pipe, or `-`.

    Raises:
        ValueError: if both are given, or there is no token.
    """
    if token and file is not None:
        raise ValueError("the token is given twice: leave --token or --token-file out")
    if STANDARD_INPUT in (token, str(file)):
        return _checked(_typed(), "standard input")
    return token if file is None else _checked(_read(file), str(file))


def _typed() -> str:
    # Without an echo, if a person types.
    return getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline(_MOST + 1)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST + 1).decode("ascii")
    except OSError as error:
        raise ValueError(f"cannot read the token in {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} contains no token") from error


def _checked(text: str, where: str) -> str:
    # A single word: no other content of a file may be sent to a server.
    if len(text) > _MOST or len(text.split()) != 1:
        raise ValueError(
            f"{where} contains no token: a token is one word, as printed by dure clients invite"
        )
    return text.strip()
