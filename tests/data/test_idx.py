"""Reading IDX files, good and damaged."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import dure.data.idx
from dure.data.idx import read_idx
from dure.errors import DataError


def idx(code: int, shape: tuple[int, ...], elements: bytes) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape) + elements


def written(folder: Path, content: bytes, name: str = "images-idx3-ubyte") -> Path:
    file = folder / name
    file.write_bytes(content)
    return file


def test_images_come_back_with_their_shape_and_bytes(tmp_path):
    file = written(tmp_path, idx(0x08, (2, 2, 3), bytes(range(12))))
    assert torch.equal(
        read_idx(file, dimensions=3), torch.arange(12, dtype=torch.uint8).view(2, 2, 3)
    )


def test_gzip_is_recognised_by_its_content_not_its_name(tmp_path):
    file = written(tmp_path, gzip.compress(idx(0x08, (3,), b"\1\2\3")))
    assert read_idx(file).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("code", "dtype"), [(0x09, ">i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]
)
def test_all_element_types_are_big_endian(tmp_path, code, dtype):
    file = written(tmp_path, idx(code, (2,), np.array([-2, 100], dtype).tobytes()))
    assert read_idx(file).tolist() == [-2, 100]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not an IDX file"),
        (b"<html>Not found</html>", "not an IDX file: it starts with 3c 68 74 6d"),
        (idx(0x07, (1,), b"\0"), "element type 07"),
        (idx(0x08, (1, 1), b"\0"), "2 dimensions, expected 1"),
        (idx(0x08, (4,), b"")[:6], "ends inside its header: 6 bytes, expected 8"),
        (idx(0x08, (4,), b"\0\0\0"), "3 bytes of elements, expected 4"),
        (idx(0x08, (4,), b"\0\0\0\0\0"), "at least 5 bytes of elements, expected 4"),
        (idx(0x0E, (2**32 - 1,), b""), "0 bytes of elements, expected 34359738360"),
        (gzip.compress(idx(0x08, (4,), b"\0\0\0\0"), mtime=0)[:-6], "damaged gzip file"),
        (b"\x1f\x8b\x08\0broken", "damaged gzip file"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_found_and_expected(tmp_path, content, complaint):
    file = written(tmp_path, content, "labels-idx1-ubyte")
    with pytest.raises(DataError, match=complaint) as caught:
        read_idx(file, dimensions=1)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (idx(0x08, (3,), b""), "at least 4 bytes of elements, expected 3"),
        (b"", "not an IDX file|element type"),
        (idx(0x0D, (2**20, 2**20, 2**20), b""), "too short for its shape"),
        (idx(0x08, (64 << 20,), b""), "and needs twice that much memory"),
    ],
    ids=["less declared", "no header", "more than can be", "more than memory"],
)
def test_no_more_is_unpacked_than_the_header_declares_and_memory_has(
    tmp_path, monkeypatch, header, complaint
):
    monkeypatch.setattr(dure.data.idx, "available_memory", lambda: 100 << 20)
    file = written(tmp_path, gzip.compress(header + bytes(64 << 20), compresslevel=1))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=complaint):
            read_idx(file)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 4 << 20


def test_a_missing_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_idx(tmp_path / "nothing")
