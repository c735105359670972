"""Messages between the holder of the labels and parties, other than the messages of training.

    holder -> party    Resume: start again after so many steps, or with the alignment
    party  -> holder   Resumed: all further messages belong to that turn
    party  -> holder   Aligned: the party has saved the alignment
    holder -> party    SaveState: save the state after a step, to which all may have to return
    party  -> holder   StateSaved: the state is on disk
    holder -> party    Evaluate: request for the head's output on test rows
    party  -> holder   Evaluated: that output, in evaluation

A turn is an attempt: whenever a party reconnects, all parties begin a new turn.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

ALIGNS = -1
"""Step of a `Resume` that starts with the alignment."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Request to return to the state after `step` steps; with `ALIGNS`, to the initial state."""

    turn: int
    step: int


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """Acknowledgement of `Resume`."""

    turn: int


class Aligned(msgspec.Struct, frozen=True, tag=True):
    """The party has saved the alignment with all parties."""


class SaveState(msgspec.Struct, frozen=True, tag="Keep"):
    """Request to save the state after this step, and to delete states before that of `since`."""

    step: int
    since: int


class StateSaved(msgspec.Struct, frozen=True, tag="Kept"):
    """Acknowledgement of `SaveState`."""

    step: int


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Request for the head's output on `count` rows of the test data, from `first` on."""

    first: int
    count: int


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """Output of the head for an `Evaluate`. values: (count, q, ...)."""

    first: int
    values: Tensor


PartiesControl = Resume | Resumed | Aligned | SaveState | StateSaved | Evaluate | Evaluated
