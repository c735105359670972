"""What one rank refuses, all ranks refuse: none waits for one that went another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dure.collectives.group import Group
from dure.errors import PeerLostError, RunFolderError

_BYTES = 1000
"""Of a refusal's text that the other ranks are told."""


@contextmanager
def agreed(group: Group, operation: str) -> Iterator[None]:
    """Inside, each rank does what it may refuse on its own, and sends nothing; all ranks enter it.

    A rank that refused raises its own error at the end. The others then raise one that names it:
    ValueError if it raised that, else RunFolderError. operation: for errors about lost ranks.
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
    coded = [float(isinstance(refusal, ValueError)), *map(float, text.ljust(_BYTES))]
    is_value, *theirs = group.all_gather_values(coded, operation)[refusing[0]]
    if refusal is not None:
        raise refusal
    said = bytes(map(int, theirs)).decode(errors="replace").rstrip()
    kind = ValueError if is_value else RunFolderError
    raise kind(f"rank {refusing[0]}: {said}")
