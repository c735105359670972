"""Private keys in files: for their owner alone, whole or not at all, and each of its kind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dure.errors import RunFolderWriteError
from dure.wire.boxes import BoxKey
from dure.wire.key_files import write_new_key
from dure.wire.signatures import Key

KINDS = pytest.mark.parametrize("kind", [Key, BoxKey])


@KINDS
def test_a_key_is_kept_for_its_owner_alone_and_is_the_same_the_next_time(kind, tmp_path) -> None:
    before = os.umask(0)
    try:
        key = kind.load_or_create(tmp_path / "client.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "client.key").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["client.key"]
    assert kind.load_or_create(tmp_path / "client.key").public == key.public
    assert kind.make().public != key.public


@pytest.mark.parametrize(
    ("kind", "private"), [(Key, Ed25519PrivateKey), (BoxKey, X25519PrivateKey)]
)
def test_processes_that_make_a_key_at_the_same_time_have_the_same(kind, private, tmp_path) -> None:
    keys = [private.generate(), private.generate()]
    for key in keys:
        write_new_key(key, tmp_path / "client.key")
    assert kind.load_or_create(tmp_path / "client.key").public == kind(keys[0]).public


@KINDS
@pytest.mark.parametrize("others", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(kind, others, tmp_path: Path) -> None:
    kind.load_or_create(tmp_path / "client.key")
    (tmp_path / "client.key").chmod(others)
    with pytest.raises(ValueError, match="chmod 600"):
        kind.load_or_create(tmp_path / "client.key")


@KINDS
@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_file_that_is_no_key_is_refused(kind, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "client.key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ValueError, match=r"client\.key is not a private key"):
        kind.load_or_create(file)


@pytest.mark.parametrize(("made", "kind", "named"), [(Key, BoxKey, "X"), (BoxKey, Key, "Ed")])
def test_a_key_of_the_other_kind_is_refused(made, kind, named, tmp_path: Path) -> None:
    made.load_or_create(tmp_path / "client.key")
    with pytest.raises(ValueError, match=f"another kind than {named}25519"):
        kind.load_or_create(tmp_path / "client.key")


@KINDS
def test_a_key_that_cannot_be_kept_says_where(kind, tmp_path: Path) -> None:
    with pytest.raises(RunFolderWriteError, match=r"missing/client\.key"):
        kind.load_or_create(tmp_path / "missing" / "client.key")
