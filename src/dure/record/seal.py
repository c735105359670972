"""The seal of a checkpoint: what `state.json` says about the files of the checkpoint and its run.

    {"checksum":"1a2b3c4d","head":"00000500","run":"…","files":{"model.safetensors":"…",…},"config":{…},
     "history":[81920,"…"],"state":{…}}

The checksum is that of all that follows it in the file, `head` the number of bytes before the
state; `files` has those of the other two. They
are CRC-32 (ISO 3309), which finds every error of up to 32 bits in a row and misses another one with
a probability of 2^-32. That is against disks, copies and slips of the hand, and not against people:
nothing that a folder says is believed to be harmless because of it.

Checkpoints that were written before there were seals have the bare state in `state.json`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from dure.record.inside import opened

_BEGIN = b'{"checksum":"'
_FIRST = len(_BEGIN) + len('1a2b3c4d",')
"""The first byte that the checksum of state.json covers."""

_HEAD = b'"head":"'
"""Before the number of bytes before the state, in eight digits."""

_PIECE = 4 << 20


class Seal(msgspec.Struct):
    """What a checkpoint says of itself.

    run: of the run that wrote it. files: checksums of the other files by name. config: what was
    asked, as far as it decides what is computed. history: the bytes of history.jsonl up to here,
    and their checksum.
    """

    run: str = ""
    files: dict[str, str] = {}
    config: dict[str, Any] = {}
    history: tuple[int, str] = (0, "00000000")


def checksum(content: bytes | memoryview, before: str = "00000000") -> str:
    """CRC-32 of the bytes, as eight hexadecimal digits. before: that of the bytes before them."""
    return f"{zlib.crc32(content, int(before, 16)):08x}"


def checksum_of(path: Path) -> str:
    """That of a file, read a few million bytes at a time. Raises OSError."""
    found = checksum(b"")
    with opened(path) as file:
        while piece := file.read(_PIECE):
            found = checksum(piece, found)
    return found


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits. Raises OSError."""
    with opened(path) as file:
        return sha256(iter(lambda: file.read(_PIECE), b""))


def sha256(pieces: Iterable[bytes | memoryview]) -> str:
    """SHA-256 of the bytes, piece after piece, as hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def with_checksum(rest: bytes) -> bytes:
    """Return a JSON object whose first field is the checksum of all that follows it.

    rest: the object without its opening brace.
    """
    return _beginning(rest) + rest


def without_checksum(content: bytes) -> bytes:
    """Return the argument of `with_checksum`. Raises ValueError if the content is another one."""
    rest = content[_FIRST:]
    if content[:_FIRST] != _beginning(rest):
        raise ValueError("its checksum is not that of its content")
    return rest


def _beginning(rest: bytes) -> bytes:
    return _BEGIN + checksum(rest).encode() + b'",'


def sealed(state: bytes, seal: Seal) -> bytes:
    """The content of state.json. state: the state as JSON."""
    # By the standard library, since msgspec has no integers beyond 64 bits. The state stays as it
    # is: it may be large, and has NaN in it, which is JSON for Python alone.
    said = json.dumps(msgspec.structs.asdict(seal), separators=(",", ":")).encode()
    end = b',"state":'
    length = _FIRST + len(_HEAD) + len('00000000",') + len(said) - len("{}") + len(end)
    rest = _HEAD + b'%08d",' % length + said[1:-1] + end + state + b"}"
    return with_checksum(rest)


def unsealed(content: bytes) -> tuple[bytes, Seal | None]:
    """(the state as JSON, the seal): the inverse of `sealed`; None for a bare state.

    Raises ValueError if the content is not what was sealed.
    """
    if not content.startswith(_BEGIN):
        return content, None
    without_checksum(content)
    length = int(content[_FIRST + len(_HEAD) :][:8])
    head = json.loads(content[:length] + b"null}")
    return content[length:-1], msgspec.convert(head, Seal)


def begins_as_of(beginning: bytes, run: str) -> bool:
    """Whether the first bytes of a state.json say that `run` wrote it."""
    said = beginning[_FIRST + len(_HEAD) + len('00000000",') :]
    return said.startswith(b'"run":' + json.dumps(run).encode() + b",")
