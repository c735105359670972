"""What the holder of the labels and parties with other features say besides what trains them.

    holder -> party    Resume: begin anew, after so many steps, or with the alignment
    party  -> holder   Resumed: all that it says from now on is of that turn
    party  -> holder   Aligned: it has written down who is with all parties
    holder -> party    Keep: the step to which all may have to come back
    party  -> holder   Kept: it is on its disk
    holder -> party    Evaluate: the model is being measured
    party  -> holder   Evaluated: what leaves its head for these, in evaluation

A turn is one attempt: whenever a party has come again, all begin a new one.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

ALIGNS = -1
"""The step of a `Resume` with which people are aligned first."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Go back to what you knew after so many steps; with `ALIGNS`, to before the first message."""

    turn: int
    step: int


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """The party has."""

    turn: int


class Aligned(msgspec.Struct, frozen=True, tag=True):
    """The party has written down who is with all parties."""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Write down what you know after this step, and forget what is older than after `since`."""

    step: int
    since: int


class Kept(msgspec.Struct, frozen=True, tag=True):
    """The party has."""

    step: int


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """So many rows of the test data, from `first` on."""

    first: int
    count: int


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """values: (count, q, ...)."""

    first: int
    values: Tensor


PartiesControl = Resume | Resumed | Aligned | Keep | Kept | Evaluate | Evaluated
