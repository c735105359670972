"""Limits on received WebSocket frames, checked before anything is buffered.

    header of a frame      its length counts at once, for the frame and for its message
    a message              at most `most` bytes; the owner may change the limit at any time
    fragments              16 per message, plus 1 for each KiB of the limit
    pings and pongs        `MOST_CONTROL` in `PERIOD` seconds
    messages               `MOST_AT_ONCE` in a piece of received bytes
    compression            none: frames of an extension are refused, since none is negotiated

WebSocket libraries bound messages by a constant for the life of a connection, and buffer a frame
whose length is within the bound. This module examines the bytes before the library gets them. It
parses the headers of frames only, and skips payloads without copying.

Source: RFC 6455, section 5.2, for headers; 10.4 for limits.
"""

from __future__ import annotations

import time

MOST_CONTROL = 1000
PERIOD = 10.0
"""Seconds in which a peer may send `MOST_CONTROL` pings and pongs.

A peer needs one or two per heartbeat, and a heartbeat may be as short as 20 ms.
"""

MOST_AT_ONCE = 256
"""Maximum messages in a piece of bytes; each takes some memory, even if empty."""

FRAGMENTS = 16
PER_FRAGMENT = 1 << 10
"""Bytes of the message limit per additional fragment, beyond `FRAGMENTS`."""

PROTOCOL_ERROR = 1002
UNSUPPORTED = 1003
FLOOD = 1008
TOO_BIG = 1009
"""Close codes of a connection."""

_TEXT = 1
_BINARY = 2
_CONTROL = 8
_LONGEST_CONTROL = 125


class FrameLimitError(Exception):
    """Received bytes exceed a limit. `code` and `reason` are for the closing frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class FrameLimits:
    """Limits on a direction of a connection.

    `most` is the maximum size in bytes of a message. `masked` is True for frames from a client.
    """

    def __init__(self, most: int, masked: bool) -> None:
        self.most = most
        self._key = 4 if masked else 0
        self._head = bytearray()
        self._left = 0
        """Bytes of the frame's payload still to be received."""
        self._size = 0
        self._fragments = 0
        self._controls = 0
        self._period = time.monotonic()
        self._at_once = 0

    def look(self, piece: bytes | bytearray | memoryview) -> None:
        """Check the next received bytes.

        Raises FrameLimitError; the caller must then discard them.
        """
        view = memoryview(piece)
        at = 0
        self._at_once = 0
        while at < len(view):
            if self._left:
                skipped = min(self._left, len(view) - at)
                self._left -= skipped
                at += skipped
                continue
            part = view[at : at + self._missing()]
            self._head += part
            at += len(part)
            if not self._missing():
                self._begins(bytes(self._head))
                self._head.clear()

    def _missing(self) -> int:
        """Return the number of header bytes still missing, as far as known."""
        if len(self._head) < 2:
            return 2 - len(self._head)
        longer = {126: 2, 127: 8}.get(self._head[1] & 0x7F, 0)
        return 2 + longer + self._key - len(self._head)

    def _begins(self, head: bytes) -> None:
        """Check the header of a frame against the limits. Raises FrameLimitError."""
        first, second = head[0], head[1] & 0x7F
        length = second
        if second > _LONGEST_CONTROL:
            length = int.from_bytes(head[2 : len(head) - self._key], "big")
        final = bool(first & 0x80)
        if first & 0x70:
            raise FrameLimitError(
                PROTOCOL_ERROR, "frames must not be compressed or have extensions"
            )
        kind = first & 0x0F
        if kind >= _CONTROL:
            self._control(length)
        else:
            self._data(kind, length, final)
        self._left = length

    def _control(self, length: int) -> None:
        if length > _LONGEST_CONTROL:
            raise FrameLimitError(PROTOCOL_ERROR, "a control frame is too long")
        now = time.monotonic()
        if now - self._period > PERIOD:
            self._period = now
            self._controls = 0
        self._controls += 1
        if self._controls > MOST_CONTROL:
            raise FrameLimitError(FLOOD, f"more than {MOST_CONTROL} pings in {PERIOD:g} s")

    def _data(self, kind: int, length: int, final: bool) -> None:
        if kind == _TEXT:
            raise FrameLimitError(UNSUPPORTED, "messages have to be bytes, but this one is text")
        if kind == _BINARY:
            self._size = 0
            self._fragments = 0
            self._at_once += 1
        self._size += length
        self._fragments += 1
        if self._size > self.most:
            reason = (
                f"a message has {self._size:,} bytes or more, but may have at most {self.most:,}"
            )
            raise FrameLimitError(TOO_BIG, reason)
        if self._at_once > MOST_AT_ONCE:
            raise FrameLimitError(FLOOD, f"more than {MOST_AT_ONCE} messages at once")
        if self._fragments > FRAGMENTS + self.most // PER_FRAGMENT:
            raise FrameLimitError(FLOOD, "a message has too many fragments")
