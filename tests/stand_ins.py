"""Small files in the formats of publishers whose data are too large for the tests, or not ours."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch

from dure.data.heart import FILES


def patients(folder: Path) -> Path:
    """Files as of the four hospitals: the ill are older, and their hearts beat more slowly."""
    folder.mkdir()
    for file in FILES:
        rows = [
            f"{40 + 20 * ill + i % 9},1,{1 + 3 * ill},{120 + i % 30},{200 + i},0,0,"
            f"{170 - 40 * ill + i % 7},{ill},{2 * ill},2,{ill},{3 + 4 * ill},{ill}"
            for i in range(40)
            for ill in (i % 2,)
        ]
        (folder / file).write_text("\n".join(rows))
    return folder


def images(folder: Path, train: int = 2000, test: int = 100) -> Path:
    """Files as MNIST's: a bar for each class, and noise."""
    folder.mkdir()
    for part, n in (("train", train), ("t10k", test)):
        labels = torch.arange(n) % 10
        pixels = torch.randint(0, 64, (n, 28, 28), generator=torch.Generator().manual_seed(n))
        for label in range(10):
            pixels[labels == label, 2 * label + 4] = 255
        for name, array in ((f"{part}-images-idx3", pixels), (f"{part}-labels-idx1", labels)):
            (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    return folder


def idx(array: torch.Tensor) -> bytes:
    """A file of bytes in the format of MNIST."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.to(torch.uint8).numpy().tobytes()


def plays(file: Path) -> Path:
    """A text as Shakespeare's works in one file: two roles who speak in turn."""
    speeches = [
        f"{role}:\nGood morrow to thee, {other}, for the {n}th time; what news from the city?\n"
        for n in range(40)
        for role, other in (("FIRST LORD", "my lord"), ("SECOND LORD", "gentle lord"))
    ]
    file.write_text("\n".join(speeches))
    return file
