"""Compression: sums over ranks, and messages, in fewer bytes. One algorithm a file.

    Cast        as bfloat16 or float16                                             2 bytes a number

What they have in common is in `compression.py`; `compression.parse` reads their text forms.
"""

from dure.collectives.compression.cast import Cast
from dure.collectives.compression.compression import Codec, Compression, Compressor
from dure.collectives.compression.error_feedback import ErrorFeedback
from dure.collectives.compression.none import NoCompression
from dure.written import read

COMPRESSIONS: dict[str, type[Compression]] = {kind.name: kind for kind in (NoCompression, Cast)}
"""Every compression by the name its text form begins with."""


def parse(text: str) -> Compression:
    """The compression that `text` names: "none", "cast:float16", "top-k:0.01", …

    Raises ValueError for an unknown name, for too many values, and for values that are not what they should be.
    """
    return read(text, COMPRESSIONS, "compression")


__all__ = [
    "COMPRESSIONS",
    "Cast",
    "Codec",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "NoCompression",
    "parse",
]
