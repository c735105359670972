"""Cache of immutable streams of tensors that clients fetch, by their digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from dure.record.seal import sha256
from dure.wire.tensors import pieces

CHUNK = 1 << 16
"""Bytes passed to the connection per call."""


class TensorStream(NamedTuple):
    """Stream of tensors, as views of their memory."""

    digest: str
    size: int
    views: Sequence[memoryview]

    def chunks(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield bytes [start, end) in pieces."""
        at = 0
        for view in self.views:
            first = max(start - at, 0)
            last = min(end - at, len(view))
            for begin in range(first, last, CHUNK):
                yield view[begin : min(begin + CHUNK, last)]
            at += len(view)
            if at >= end:
                return


class BlobCache:
    """Streams that clients can fetch now."""

    def __init__(self) -> None:
        self._streams: dict[str, TensorStream] = {}
        self._always: set[str] = set()

    def keep(self, tensors: Mapping[str, Tensor]) -> TensorStream:
        """Add a stream as `put` does, for the lifetime of the cache."""
        stream = self.put(tensors)
        self._always.add(stream.digest)
        return stream

    def put(self, tensors: Mapping[str, Tensor]) -> TensorStream:
        """Add the tensors' stream. The tensors must not change while the cache has the stream."""
        views = list(pieces(tensors))
        stream = TensorStream(sha256(views), sum(map(len, views)), views)
        self._streams[stream.digest] = stream
        return stream

    def get(self, digest: str) -> TensorStream | None:
        return self._streams.get(digest)

    def keep_only(self, digests: set[str]) -> None:
        """Drop all streams except these and those of `keep`."""
        kept = digests | self._always
        self._streams = {d: s for d, s in self._streams.items() if d in kept}
