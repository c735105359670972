"""Compression: sums over ranks, and messages, in fewer bytes. One algorithm a file.

    NoCompression   unchanged
    Cast            as bfloat16 or float16
    TopK            the largest numbers and their places, error feedback        Alistarh, Stich
    QSGD            rounded at random to few levels, without bias               Alistarh
    Int8            rounded to 255 levels, error feedback                       Dettmers
    OneBit          signs and two means a column, error feedback                Seide
    Sign            signs and a mean magnitude a tensor, error feedback         Karimireddy
    PowerSGD        a matrix of low rank, error feedback                        Vogels

The common interface is in `compression.py`. As text, `top-k:0.01`, `power-sgd:2`: `parse` is the
inverse of `str`, and reads `bfloat16` as `cast:bfloat16`.
"""

from dure.collectives.compression.cast import HALVES, Cast
from dure.collectives.compression.compression import Compression, Compressor
from dure.collectives.compression.error_feedback import ErrorFeedback
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.int8 import Int8
from dure.collectives.compression.none import NoCompression
from dure.collectives.compression.one_bit import OneBit
from dure.collectives.compression.power_sgd import PowerSGD
from dure.collectives.compression.qsgd import QSGD
from dure.collectives.compression.sign import Sign
from dure.collectives.compression.top_k import TopK
from dure.settings import read

COMPRESSIONS: dict[str, type[Compression]] = {
    compression.name: compression
    for compression in (NoCompression, Cast, TopK, QSGD, Int8, OneBit, Sign, PowerSGD)
}
"""Every compression by the name with which its text form begins."""


def parse(text: str) -> Compression:
    """Return the compression that `text` names: "none", "cast:float16", "float16", "top-k:0.01", …

    Raises ValueError for an unknown name, for too many values, and for invalid values.
    """
    if text.strip() in HALVES:
        return Cast(text.strip())
    return read(text, COMPRESSIONS, "compression")


__all__ = [
    "COMPRESSIONS",
    "QSGD",
    "Cast",
    "Codec",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "Int8",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "Sign",
    "TopK",
    "parse",
]
