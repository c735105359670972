"""The messages of clients, of the bytes that a proxy has seen on their way to the server.

A message is the body of a request, all parts of an upload together, or a message of a WebSocket
without the frames around it. Requests without a body, pings and goodbyes are none.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Message(NamedTuple):
    """client: its public key, as its requests have it; empty where it has not signed."""

    client: str
    path: str
    content: bytes

    @property
    def form(self) -> tuple[int, str]:
        """(bytes, digest), as a line of the log has them."""
        return len(self.content), hashlib.sha256(self.content).hexdigest()


@dataclass
class _Connection:
    """What has come on one, and is not a whole message."""

    unread: bytearray = field(default_factory=bytearray)
    client: str = ""
    is_socket: bool = False
    fragments: bytearray = field(default_factory=bytearray)
    uploads: dict[str, bytearray] = field(default_factory=dict)

    def messages(self, piece: bytes) -> Iterator[Message]:
        self.unread += piece
        while True:
            before = len(self.unread)
            found = self._frame() if self.is_socket else self._request()
            if found is not None:
                yield found
            if len(self.unread) == before:
                return

    def _request(self) -> Message | None:
        end = self.unread.find(b"\r\n\r\n")
        if end < 0:
            return None
        first, *lines = bytes(self.unread[:end]).decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        begin = end + 4
        until = begin + int(headers.get("content-length", 0))
        if len(self.unread) < until:
            return None
        content = bytes(self.unread[begin:until])
        del self.unread[:until]
        method, path, _ = first.split(" ")
        self.client = headers.get("dure-client", "")
        self.is_socket = headers.get("upgrade") == "websocket"
        if method == "PATCH":
            return self._part(path, int(headers["upload-offset"]), content)
        return Message(self.client, path, content) if content else None

    def _part(self, path: str, at: int, content: bytes) -> Message:
        """What has come of an upload: as a whole it has the digest of its line."""
        whole = self.uploads.setdefault(path, bytearray())
        whole[at:] = content
        return Message(self.client, path, bytes(whole))

    def _frame(self) -> Message | None:
        head = bytes(self.unread[:14])
        if len(head) < 6:
            return None
        short = head[1] & 0x7F
        longer = {126: "!H", 127: "!Q"}.get(short)
        size, at = short, 2
        if longer is not None:
            if len(head) < 2 + struct.calcsize(longer) + 4:
                return None
            (size,) = struct.unpack_from(longer, head, 2)
            at += struct.calcsize(longer)
        if len(self.unread) < at + 4 + size:
            return None
        mask = int.from_bytes(head[at : at + 4] * (size // 4 + 1), "big") >> 8 * (4 - size % 4)
        masked = int.from_bytes(self.unread[at + 4 : at + 4 + size], "big")
        content = (masked ^ mask).to_bytes(size, "big") if size else b""
        del self.unread[: at + 4 + size]
        if head[0] & 0x0F > 2:
            return None
        self.fragments += content
        if not head[0] & 0x80:
            return None
        whole = bytes(self.fragments)
        self.fragments.clear()
        return Message(self.client, "channel", whole)


def messages(seen: Sequence[tuple[int, bytes]]) -> list[Message]:
    """All messages, in the order in which they were there as a whole."""
    connections: dict[int, _Connection] = {}
    return [
        message
        for number, piece in seen
        for message in connections.setdefault(number, _Connection()).messages(piece)
    ]


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_log(path: Path, seen: Sequence[Message]) -> list[str]:
    """Every message has its line, in order, and every line its message; the kinds of the lines.

    A message that is sent again has one line, as an upload whose parts come one by one.
    """
    lines = lines_of(path)
    forms = [(line["bytes"], line["digest"]) for line in lines]
    for about in ("/v1/watch", ""):
        # Whether work is wanted is asked on a connection of its own.
        watches = bool(about)
        own = [
            form
            for form, line in zip(forms, lines, strict=True)
            if (line["kind"] == "watch") == watches
        ]
        came = [each for each in seen if (each.path == "/v1/watch") == watches]
        at = -1
        for message in came:
            if at >= 0 and message.form == own[at]:
                continue
            part = message.path.startswith("/v1/uploads/")
            if at + 1 < len(own) and message.form == own[at + 1]:
                at += 1
            elif not part:
                raise AssertionError(f"{message.path} {message.form} has no line at {at + 1}")
        assert at + 1 == len(own), f"{own[at + 1 :]} stand in the log, and did not leave"
    return [str(line["kind"]) for line in lines]
