"""PNG files without a library: rows of bytes, compressed.

    signature, IHDR (size, 8 bits, grey or RGB), IDAT (zlib of rows, each after a 0), IEND

Source: W3C, "Portable Network Graphics (PNG) Specification", second edition, 2003.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return the file of a picture.

    pixels: shape (height, width), grey, or (height, width, 3), RGB. Raises ValueError for another
    shape.
    """
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(
            f"a picture needs the shape (height, width) or with 3 colours, not {pixels.shape}"
        )
    height, width = pixels.shape[:2]
    kind = 0 if pixels.ndim == 2 else 2
    rows = pixels.astype(np.uint8).reshape(height, -1)
    # The byte before each row names its filter: 0 is none.
    content = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return SIGNATURE + b"".join(
        _chunk(name, data)
        for name, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(content, 9)),
            (b"IEND", b""),
        )
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def strip(rows: list[NDArray[np.float64]], low: float, high: float, least: int = 48) -> bytes:
    """Return a PNG of pictures in rows, such as originals above their reconstructions.

    rows: each of shape (n, channels, height, width) with 1 or 3 channels, of values from low to
    high. least: least height of a picture in pixels; smaller pictures are enlarged.
    """
    scale = max(1, -(-least // rows[0].shape[2]))
    lines = [np.concatenate([_tile(one, low, high, scale) for one in row], axis=1) for row in rows]
    pixels = np.concatenate(lines, axis=0)
    return png(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _tile(picture: NDArray[np.float64], low: float, high: float, scale: int) -> NDArray[np.uint8]:
    """Return a picture, enlarged, with a white edge."""
    spread = max(high - low, 1e-12)
    values = np.clip((picture - low) / spread, 0, 1) * 255
    pixels = np.nan_to_num(values).round().astype(np.uint8).transpose(1, 2, 0)
    large = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    return np.pad(large, ((1, 1), (1, 1), (0, 0)), constant_values=255)
