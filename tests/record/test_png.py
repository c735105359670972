"""Pictures as PNG files, read again by hand."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from dure.record.png import SIGNATURE, png, strip


def read(content: bytes) -> np.ndarray:
    """The pixels of a file whose rows have no filter; checksums are compared."""
    assert content[:8] == bytes([0x89, 0x50, 0x4E, 0x47, 0x0D, 0x0A, 0x1A, 0x0A]) == SIGNATURE
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        name = content[at + 4 : at + 8]
        data = content[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", content[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(name + data)
        chunks[name] = data
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, kind = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    colours = {0: 1, 2: 3}[kind]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, colours)


@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3)])
def test_pixels_come_back(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(read(png(pixels)).reshape(shape), pixels)


def test_a_strip_has_its_rows_above_each_other_and_what_is_beyond_the_range_cut_off() -> None:
    above = np.zeros((2, 1, 4, 4))
    below = np.ones((2, 1, 4, 4)) * [[[[-5.0, 0.0, 0.5, 9.0]]]]
    pixels = read(strip([above, below], 0.0, 1.0, least=8))[:, :, 0]
    assert pixels.shape == (20, 20)
    assert (pixels[1:9, 1:9] == 0).all()
    assert pixels[11, 1:9].tolist() == [0, 0, 0, 0, 128, 128, 255, 255]
    # Not a number is black.
    assert (read(strip([above * np.nan], 0.0, 1.0))[1:9, 1:9] == 0).all()


def test_other_shapes_are_no_pictures() -> None:
    with pytest.raises(ValueError, match="the shape"):
        png(np.zeros((2, 2, 4), np.uint8))
