"""Tensors that clients fetch, by the digest of their stream. What lies here never changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from dure.record.seal import sha256
from dure.wire.tensors import pieces

CHUNK = 1 << 16
"""Bytes that are handed to the connection at once."""


class Stream(NamedTuple):
    """A stream of tensors, as views of their memory."""

    digest: str
    size: int
    views: Sequence[memoryview]

    def chunks(self, start: int, end: int) -> Iterator[memoryview]:
        """Bytes [start, end) in pieces."""
        at = 0
        for view in self.views:
            first = max(start - at, 0)
            last = min(end - at, len(view))
            for begin in range(first, last, CHUNK):
                yield view[begin : min(begin + CHUNK, last)]
            at += len(view)
            if at >= end:
                return


class Shelf:
    """What can be fetched now."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._always: set[str] = set()

    def keep(self, tensors: Mapping[str, Tensor]) -> Stream:
        """As `put`, for as long as there is the shelf."""
        stream = self.put(tensors)
        self._always.add(stream.digest)
        return stream

    def put(self, tensors: Mapping[str, Tensor]) -> Stream:
        """Makes the tensors' stream available. They must not be changed while it is."""
        views = list(pieces(tensors))
        stream = Stream(sha256(views), sum(map(len, views)), views)
        self._streams[stream.digest] = stream
        return stream

    def get(self, digest: str) -> Stream | None:
        return self._streams.get(digest)

    def keep_only(self, digests: set[str]) -> None:
        """Forgets all others."""
        kept = digests | self._always
        self._streams = {d: s for d, s in self._streams.items() if d in kept}
