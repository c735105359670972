"""The seal of a checkpoint: checksums and settings in front of the state in `state.json`.

    {"checksum":"1a2b3c4d","head":"00000500","run":"…","files":{"model.safetensors":"…",…},
    "config":{…},"history":[81920,"…"],"state":{…}}

The checksum covers all bytes that follow it in the file, `head` is the number of bytes before the
state; `files` has the checksums of the other two files. They are CRC-32 (ISO 3309), which detects
every error burst of up to 32 bits and misses other errors with a probability of 2^-32. They protect
against faulty disks, copies and mistakes, and not against attackers: no content of a folder is
trusted because of them.

Checkpoints older than seals have the bare state in `state.json`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from dure.record.untrusted_files import opened

_BEGIN = b'{"checksum":"'
_FIRST = len(_BEGIN) + len('1a2b3c4d",')
"""First byte that the checksum of state.json covers."""

_HEAD = b'"head":"'
"""Text before the number of bytes before the state, in eight digits."""

_PIECE = 4 << 20


class Seal(msgspec.Struct):
    """The seal of a checkpoint.

    run: identifier of the run. files: checksums of the other files by name. config: settings that
    determine the computation. history: bytes of history.jsonl up to the checkpoint, and their
    checksum.
    """

    run: str = ""
    files: dict[str, str] = {}
    config: dict[str, Any] = {}
    history: tuple[int, str] = (0, "00000000")


def checksum(content: bytes | memoryview, before: str = "00000000") -> str:
    """Return the CRC-32 of the bytes in eight hex digits. before: CRC-32 of the preceding bytes."""
    return f"{zlib.crc32(content, int(before, 16)):08x}"


def checksum_of(path: Path) -> str:
    """Return the CRC-32 of a file, read a few million bytes at a time. Raises OSError."""
    found = checksum(b"")
    with opened(path) as file:
        while piece := file.read(_PIECE):
            found = checksum(piece, found)
    return found


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits. Raises OSError."""
    with opened(path) as file:
        return sha256(iter(lambda: file.read(_PIECE), b""))


def sha256(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of concatenated pieces, as hexadecimal digits."""
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
    """Return the argument of `with_checksum`. Raises ValueError for a wrong checksum."""
    rest = content[_FIRST:]
    if content[:_FIRST] != _beginning(rest):
        raise ValueError("its checksum does not match its content")
    return rest


def _beginning(rest: bytes) -> bytes:
    return _BEGIN + checksum(rest).encode() + b'",'


def sealed(state: bytes, seal: Seal) -> bytes:
    """Return the content of state.json. state: the state as JSON."""
    # By the standard library, since msgspec has no integers beyond 64 bits. The state is copied as
    # bytes: it may be large, and has NaN in it, which only Python's JSON accepts.
    said = json.dumps(msgspec.structs.asdict(seal), separators=(",", ":")).encode()
    end = b',"state":'
    length = _FIRST + len(_HEAD) + len('00000000",') + len(said) - len("{}") + len(end)
    rest = _HEAD + b'%08d",' % length + said[1:-1] + end + state + b"}"
    return with_checksum(rest)


def unsealed(content: bytes) -> tuple[bytes, Seal | None]:
    """Return (the state as JSON, the seal) of `sealed`; the seal is None for a bare state.

    Raises ValueError if the checksum is wrong.
    """
    if not content.startswith(_BEGIN):
        return content, None
    without_checksum(content)
    length = int(content[_FIRST + len(_HEAD) :][:8])
    head = json.loads(content[:length] + b"null}")
    return content[length:-1], msgspec.convert(head, Seal)


def begins_as_of(beginning: bytes, run: str) -> bool:
    """Return whether the first bytes of a state.json name `run` as their run."""
    said = beginning[_FIRST + len(_HEAD) + len('00000000",') :]
    return said.startswith(b'"run":' + json.dumps(run).encode() + b",")
