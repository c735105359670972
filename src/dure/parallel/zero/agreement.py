"""Agreement on errors: if any rank refuses a request, all ranks raise an error.

Otherwise the other ranks would wait for messages that the refusing rank never sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dure.collectives.group import Group
from dure.errors import PeerLostError, RunFolderError

_BYTES = 1000
"""Bytes of the error's text that are sent to the other ranks."""


@contextmanager
def raise_on_all_ranks(group: Group, operation: str) -> Iterator[None]:
    """Context manager: an error of any rank is raised on all ranks. All ranks enter it.

    The body must not send messages. A rank that failed raises its own error at the end. The other
    ranks raise an error that names that rank: ValueError if the rank raised a ValueError, else
    RunFolderError. operation: the operation's name in errors about lost ranks.
    """
    refusal: Exception | None = None
    try:
        yield
    except PeerLostError:
        raise
    except Exception as error:
        refusal = error
    told = group.all_gather_values([float(refusal is not None)], operation)
    refusing = [rank for rank, (refuses,) in enumerate(told) if refuses]
    if not refusing:
        return
    text = f"{refusal}".encode()[:_BYTES] if refusal is not None else b""
    # Text as numbers, padded to a fixed length: all ranks have to send equally many numbers.
    coded = [float(isinstance(refusal, ValueError)), *map(float, text.ljust(_BYTES))]
    is_value, *theirs = group.all_gather_values(coded, operation)[refusing[0]]
    if refusal is not None:
        raise refusal
    said = bytes(map(int, theirs)).decode(errors="replace").rstrip()
    kind = ValueError if is_value else RunFolderError
    raise kind(f"rank {refusing[0]}: {said}")
