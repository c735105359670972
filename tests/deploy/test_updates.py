"""The files of updates: parts in any order, restarts, wrong digests, full disks, mappings."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.deploy import updates as module
from dure.deploy.updates import (
    OvertakenError,
    PartError,
    Updates,
    Upload,
)
from dure.errors import DamagedUpdateError, RunFolderError, RunFolderWriteError
from dure.record.weights import header_of
from dure.wire.tensors import TensorsError, TensorSpec, bytes_of, forms_of, pieces

TENSORS = {
    "weight": torch.arange(600.0).reshape(20, 30),
    "flags": torch.tensor([True, False, True]),
    "after": torch.arange(5, dtype=torch.int64),
    "none": torch.zeros(0, 4),
    "step": torch.tensor(7),
}
STREAM = b"".join(pieces(TENSORS))


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def send(upload: Upload, offset: int, size: int, stream: bytes = STREAM) -> int:
    part = stream[offset : offset + size]
    return write(upload, offset, part, digest(part))


def write(upload: Upload, offset: int, content: bytes, said: str, piece: int = 300) -> int:
    """A part, piece by piece. said: its digest."""
    part = upload.part(offset)
    for begin in range(0, len(content), piece):
        part.add(content[begin : begin + piece])
    return part.done(said)


def received(updates: Updates, ticket: int, stream: bytes = STREAM) -> None:
    upload = updates.open(ticket, len(stream), digest(stream))
    while upload.left:
        send(upload, upload.offset, 1000, stream)
    upload.complete()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, len(STREAM)), st.integers(0, 900)),
            st.tuples(st.just("next"), st.integers(-300, 300), st.integers(0, 900)),
            st.tuples(st.just("restart"), st.just(0), st.just(0)),
            st.tuples(st.just("killed"), st.integers(0, 900), st.integers(0, 99)),
        ),
        max_size=15,
    )
)
def test_parts_may_come_in_any_order_and_again_and_the_server_may_be_killed(
    steps: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "updates"
        upload = Updates(folder).open(3, len(STREAM), digest(STREAM))
        for what, at, size in steps:
            before = upload.offset
            offset = at if what == "send" else max(0, before + at)
            if what in ("send", "next"):
                end = offset + len(STREAM[offset : offset + size])
                if offset <= before:
                    assert send(upload, offset, size) == max(before, end)
                else:
                    with pytest.raises(PartError, match=f"but {before} bytes are stored"):
                        send(upload, offset, size)
                continue
            if what == "killed":
                # Within a part: of it and of the line about it anything may be there.
                with open(folder / "3.part", "ab") as file:
                    file.write(STREAM[before : before + at])
                with open(folder / "3.parts", "ab") as file:
                    file.write((b'{"end":%d,"digest":"%064x"}\n' % (before + 1, 0))[:size])
            upload = Updates(folder).open(3, len(STREAM), digest(STREAM))
            assert upload.offset == before
        while upload.left:
            send(upload, upload.offset, 700)
        upload.complete()
        assert (folder / "3.safetensors").read_bytes() == STREAM
        assert [path.name for path in folder.iterdir()] == ["3.safetensors"]


@pytest.mark.parametrize("lost", [1, 999, 1000, 1500, 2000])
def test_only_parts_that_are_whole_count_after_a_restart(tmp_path: Path, lost: int) -> None:
    upload = Updates(tmp_path).open(1, len(STREAM), digest(STREAM))
    send(upload, 0, 1000)
    send(upload, 1000, 1000)
    # Zeros, as some file systems leave them when the power fails.
    with open(tmp_path / "1.part", "r+b") as file:
        file.seek(2000 - lost)
        file.write(bytes(lost))
    upload = Updates(tmp_path).open(1, len(STREAM), digest(STREAM))
    assert upload.offset == (2000 - lost) // 1000 * 1000
    assert (tmp_path / "1.part").stat().st_size == upload.offset
    # And again, from what the first restart wrote down.
    assert Updates(tmp_path).open(1, len(STREAM), digest(STREAM)).offset == upload.offset


def test_a_part_that_is_not_what_it_says_changes_nothing(tmp_path: Path) -> None:
    upload = Updates(tmp_path).open(1, len(STREAM), digest(STREAM))
    send(upload, 0, 500)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    part = STREAM[500:900]
    for offset, content, said, reason in [
        (500, part[:-1], digest(part), "not match its digest"),
        (500, part, digest(part)[:-1], "not match its digest"),
        (600, part, digest(part), "500 bytes are stored"),
        (-1, part, digest(part), "500 bytes are stored"),
        (500, STREAM, digest(STREAM), "were announced"),
        (100, b"x" * 400, digest(b"x" * 400), "differ from the stored ones"),
        (100, b"x" * 600, digest(b"x" * 600), "differ from the stored ones"),
    ]:
        with pytest.raises(PartError, match=reason):
            write(upload, offset, content, said)
    with pytest.raises(PartError, match=f"{len(STREAM) - 500} bytes of {len(STREAM)} are missing"):
        upload.complete()
    assert upload.offset == 500
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_an_update_that_is_not_what_it_says_begins_anew(tmp_path: Path) -> None:
    updates = Updates(tmp_path)
    upload = updates.open(1, len(STREAM), digest(STREAM))
    other = bytes(len(STREAM))
    send(upload, 0, len(STREAM), other)
    with pytest.raises(PartError, match="send it again"):
        upload.complete()
    assert upload.offset == 0
    assert updates.all() == []
    received(updates, 1)
    assert equal(updates.read(1, forms_of(TENSORS)), TENSORS)


def test_what_is_complete_stays_so(tmp_path: Path) -> None:
    updates = Updates(tmp_path)
    received(updates, 1)
    for again in (updates, Updates(tmp_path)):
        upload = again.open(1, len(STREAM), digest(STREAM))
        assert upload.left == 0
        upload.complete()
        assert send(upload, 100, 200) == len(STREAM)
        assert again.all() == [1]
        assert again.digest(1) == digest(STREAM)


def test_another_announcement_begins_anew_and_ends_the_first(tmp_path: Path) -> None:
    for restart in (False, True):
        updates = Updates(tmp_path)
        first = updates.open(1, len(STREAM), digest(STREAM))
        send(first, 0, 1000)
        if restart:
            updates = Updates(tmp_path)
        other = STREAM[::-1]
        second = updates.open(1, len(other), digest(other))
        assert second.offset == 0
        if not restart:
            with pytest.raises(PartError, match="not wanted any more"):
                send(first, 1000, 100)
        received(updates, 1, other)
        assert (tmp_path / "1.safetensors").read_bytes() == other


def test_an_update_of_no_bytes_is_complete_at_once(tmp_path: Path) -> None:
    updates = Updates(tmp_path)
    received(updates, 1, b"")
    assert updates.all() == [1]


def test_tensors_are_read_as_mappings_that_belong_to_the_reader(tmp_path: Path) -> None:
    updates = Updates(tmp_path)
    received(updates, 1)
    # In another order than they lie there, which is the reader's.
    expected = dict(reversed(TENSORS.items()))
    found = updates.read(1, forms_of(expected))
    assert equal(found, expected)
    found["weight"].fill_(3)
    assert equal(updates.read(1, forms_of(expected)), expected)
    assert updates.digest(1) == digest(STREAM)
    # The mapping outlives its file.
    updates.delete([1])
    assert (found["weight"] == 3).all()
    assert torch.equal(found["step"], TENSORS["step"])
    with pytest.raises(RunFolderError, match=r"cannot read .*1.safetensors: No such file"):
        updates.read(1, forms_of(expected))
    with pytest.raises(RunFolderError, match=r"cannot read .*1.safetensors: No such file"):
        updates.digest(1)


def test_reading_a_large_update_takes_no_memory_for_it(tmp_path: Path) -> None:
    large = {"weight": torch.zeros(1 << 24), "bias": torch.zeros(3)}
    stream = b"".join(pieces(large))
    updates = Updates(tmp_path)
    (tmp_path / "1.safetensors").write_bytes(stream)
    before = anonymous_bytes()
    found = updates.read(1, forms_of(large), digest(stream))
    float(found["weight"].sum())
    assert anonymous_bytes() - before < len(stream) // 4


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (STREAM[:-1], "at most"),
        (STREAM + b"\0", "have to be"),
        (b"".join(pieces({**TENSORS, "step": torch.tensor(7.0)})), "step is"),
        (b"".join(pieces({"weight": TENSORS["weight"]})), "flags is missing"),
        (b"".join(pieces({**TENSORS, "more": torch.zeros(1)})), "more is not a tensor"),
        (b"", "ends within"),
        (STREAM[:300], "ends within"),
        (STREAM.replace(bytes_of(TENSORS["flags"]).tobytes(), b"\1\2\1"), "not booleans"),
    ],
)
def test_what_is_no_update_of_this_model_is_refused(
    tmp_path: Path, stream: bytes, reason: str
) -> None:
    updates = Updates(tmp_path)
    received(updates, 1, stream)
    with pytest.raises(TensorsError, match=reason):
        updates.read(1, forms_of(TENSORS))


def flipped(content: bytes, place: float, bits: int) -> bytes:
    """place: of the byte, as a share of the content."""
    changed = bytearray(content)
    changed[int(place * len(content))] ^= bits
    return bytes(changed)


@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), restart=st.booleans())
def test_a_byte_that_has_changed_is_found_before_an_update_is_read(
    place: float, bits: int, restart: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        updates = Updates(Path(name))
        received(updates, 1)
        whole = Path(name) / "1.safetensors"
        whole.write_bytes(flipped(STREAM, place, bits))
        # Clocks of file systems may stand still for some milliseconds.
        os.utime(whole, (1.0, 1.0))
        updates = Updates(Path(name)) if restart else updates
        with pytest.raises(DamagedUpdateError, match=r"1\.safetensors is damaged"):
            updates.read(1, forms_of(TENSORS), digest(STREAM))


@pytest.mark.parametrize("other", [b"", STREAM[:-1], STREAM + b"\0", STREAM[::-1], None])
def test_an_update_that_was_cut_exchanged_or_removed_is_found(
    tmp_path: Path, other: bytes | None
) -> None:
    received(Updates(tmp_path), 1)
    whole = tmp_path / "1.safetensors"
    if other is None:
        whole.unlink()
    else:
        whole.write_bytes(other)
    with pytest.raises(DamagedUpdateError, match=r"1\.safetensors"):
        Updates(tmp_path).check(1, digest(STREAM))


def test_what_this_process_has_received_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = Updates(tmp_path)
    received(updates, 1)
    monkeypatch.setattr(module, "sha256_of", lambda path: pytest.fail("it was hashed again"))
    assert equal(updates.read(1, forms_of(TENSORS), digest(STREAM)), TENSORS)


def test_a_header_of_any_length_is_read(tmp_path: Path) -> None:
    # Of another writer, which does not fill it up to a multiple of eight.
    form = TensorSpec(torch.float32, (2,))
    text = header_of({"a": form})[8:].strip()
    stream = len(text).to_bytes(8, "little") + text + bytes_of(torch.tensor([1.0, 2.0]))
    assert len(text) % 4
    updates = Updates(tmp_path)
    received(updates, 1, stream)
    assert torch.equal(updates.read(1, {"a": form})["a"], torch.tensor([1.0, 2.0]))


def test_files_go_with_their_tickets(tmp_path: Path) -> None:
    updates = Updates(tmp_path)
    for ticket in (1, 2):
        received(updates, ticket)
    under_way = {each: updates.open(each, len(STREAM), digest(STREAM)) for each in (3, 4)}
    for upload in under_way.values():
        send(upload, 0, 100)
    (tmp_path / "notes.txt").write_text("the user's")
    updates.delete([1, 9])
    assert updates.all() == [2]
    updates.keep_only([2, 4])
    names = {"2.safetensors", "4.part", "4.parts", "notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    with pytest.raises(PartError, match="not wanted any more"):
        send(under_way[3], 100, 100)
    assert send(under_way[4], 100, 100) == 200
    assert {path.name for path in tmp_path.iterdir()} == names
    # Those of an earlier life too.
    Updates(tmp_path).keep_only([])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_room_is_promised_to_all_that_are_under_way(tmp_path: Path, monkeypatch) -> None:
    free = module.KEPT_FREE + 2 * len(STREAM) + 10
    monkeypatch.setattr(module, "free_bytes", lambda folder: free)
    updates = Updates(tmp_path)
    first = updates.open(1, len(STREAM), digest(STREAM))
    updates.open(2, len(STREAM), digest(STREAM))
    for _ in range(2):
        with pytest.raises(RunFolderWriteError, match=f"{2 * len(STREAM)} are reserved for other"):
            updates.open(3, len(STREAM), digest(STREAM))
    # What was promised is not taken back, nor is what is here promised any more.
    assert updates.open(1, len(STREAM), digest(STREAM)) is first
    updates.delete([2])
    updates.open(3, len(STREAM), digest(STREAM))


def test_a_full_disk_refuses_the_part_and_takes_it_later(tmp_path: Path, monkeypatch) -> None:
    room = 700
    pwrite = os.pwrite

    def until_full(descriptor: int, content: memoryview, offset: int) -> int:
        if offset >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, content[: room - offset], offset)

    upload = Updates(tmp_path).open(1, len(STREAM), digest(STREAM))
    send(upload, 0, 500)
    with monkeypatch.context() as full:
        full.setattr(module.os, "pwrite", until_full)
        with pytest.raises(RunFolderWriteError, match=r"cannot write .*1.part: No space left"):
            send(upload, 500, 500)
    assert upload.offset == 500
    assert (tmp_path / "1.part").stat().st_size == 500
    while upload.left:
        send(upload, upload.offset, 500)
    upload.complete()


def test_a_sync_that_fails_leaves_nothing_that_could_be_taken_for_it(
    tmp_path: Path, monkeypatch
) -> None:
    updates = Updates(tmp_path)
    upload = updates.open(1, len(STREAM), digest(STREAM))
    send(upload, 0, len(STREAM))

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(module, "_sync", fails)
        with pytest.raises(RunFolderWriteError, match="Input/output error"):
            upload.complete()
    assert (upload.offset, updates.all()) == (0, [])
    received(updates, 1)
    assert (tmp_path / "1.safetensors").read_bytes() == STREAM


def test_a_part_that_another_has_overtaken_writes_nothing_more(tmp_path: Path) -> None:
    """Its client has lost the link, which the server does not know yet, and sends anew."""
    updates = Updates(tmp_path)
    upload = updates.open(1, len(STREAM), digest(STREAM))
    late = upload.part(0)
    late.add(b"x" * 500)
    part = upload.part(0)
    part.add(STREAM[:400])
    with pytest.raises(OvertakenError):
        late.add(b"x" * 100)
    with pytest.raises(OvertakenError):
        late.done(digest(b"x" * 500))
    part.add(STREAM[400:])
    assert part.done(digest(STREAM)) == len(STREAM)
    upload.complete()
    assert equal(updates.read(1, forms_of(TENSORS)), TENSORS)


def test_what_has_come_of_a_part_counts_only_with_all_of_it(tmp_path: Path) -> None:
    upload = Updates(tmp_path).open(1, len(STREAM), digest(STREAM))
    send(upload, 0, 500)
    upload.part(500).add(STREAM[500:900])
    assert upload.offset == 500
    again = Updates(tmp_path).open(1, len(STREAM), digest(STREAM))
    assert again.offset == 500
    assert (tmp_path / "1.part").stat().st_size == 500
    # A shorter one after it leaves nothing of it.
    again.part(500).add(STREAM[500:900])
    send(again, 500, 100)
    received_rest(again)
    assert digest((tmp_path / "1.safetensors").read_bytes()) == digest(STREAM)


def received_rest(upload: Upload) -> None:
    while upload.left:
        send(upload, upload.offset, 1000)
    upload.complete()
