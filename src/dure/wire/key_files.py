"""Private keys in files: PEM without a password, readable by their owner only.

A file appears atomically, and the first writer wins: two processes that create a key at the same
time both get the key of the first.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TypeVar

from dure.record.disk import disk_errors, sync_folder
from dure.record.untrusted_files import opened

try:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

Private = TypeVar("Private", Ed25519PrivateKey, X25519PrivateKey)

_MOST = 1 << 16
"""Maximum bytes read from a file; a key has some hundred bytes."""


def load_or_create_key(path: Path, kind: type[Private]) -> Private:
    """Load the key from a file; create the file if it is missing.

    Raises ValueError for a file that is not a key of this kind or that others may read, and
    RunFolderWriteError if a new key cannot be written.
    """
    if not path.exists():
        with disk_errors(path):
            write_new_key(kind.generate(), path)
    # Read the file: another process may have created it first.
    return _read(path, kind)


def write_new_key(private: Ed25519PrivateKey | X25519PrivateKey, path: Path) -> None:
    """Write a key unless the file exists, for example from another process. Raises OSError."""
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    # Left by a killed process: the next process may get its process id, as in a container.
    beside.unlink(missing_ok=True)
    # The mode protects the key from its first byte on.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, path)
        except FileExistsError:
            return
    finally:
        beside.unlink()
    sync_folder(path.parent)


def _read(path: Path, kind: type[Private]) -> Private:
    try:
        with opened(path, most=_MOST, links=True) as file:
            others = os.fstat(file.fileno()).st_mode & 0o077
            pem = file.read(_MOST)
    except OSError as error:
        raise ValueError(f"cannot read the key {path}: {error.strerror}") from error
    if others:
        raise ValueError(f"others may read the private key {path}: chmod 600 {path}")
    try:
        private = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a private key in PEM without a password") from error
    if not isinstance(private, kind):
        wanted = kind.__name__.removesuffix("PrivateKey")
        raise ValueError(f"{path} has a key of another kind than {wanted}")
    return private
