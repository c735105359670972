"""Rules for each field of each message of a party, and the place of each check.

A party that violates a rule is rejected by name, and the run ends: training needs its columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.split.alignment import Blinded, DoubleBlinded
from dure.split.blame import GRADIENT
from dure.split.network.checks import FieldRule
from dure.split.network.control import Aligned, Evaluated, Resumed, StateSaved
from dure.split.parties.messages import Activations

_POINTS = (
    "32 bytes each; points of the curve, not of small order; no point twice, and no point that "
    "was sent to the party (`PeerPoints`)"
)

RULES: Mapping[type, tuple[FieldRule, ...]] = {
    Resumed: (
        FieldRule(
            "turn",
            "the newest turn, once; messages of earlier turns are discarded "
            "(`VerticalSplitServer`)",
        ),
    ),
    Blinded: (
        FieldRule(
            "first",
            "a part of the party's list that has not arrived before, or the same part again "
            "(`PeerPoints`)",
        ),
        FieldRule(
            "total",
            "equal in all messages; at most the number of people at check-in (`PeerPoints`)",
        ),
        FieldRule("points", _POINTS),
    ),
    DoubleBlinded: (
        FieldRule(
            "first",
            "a part of the holder's list that has not arrived before, or the same part again "
            "(`PeerPoints`)",
        ),
        FieldRule("points", _POINTS),
    ),
    Aligned: (),
    Activations: (
        FieldRule("step", "the current step, once (`LabelHolder`)"),
        FieldRule(
            "values",
            "dtype and shape of the head's output, for the people of the batch; no NaN "
            "(`LabelHolder`)",
        ),
        FieldRule("trains", "a boolean: the party decides whether its head needs gradients"),
    ),
    StateSaved: (FieldRule("step", "the requested step, once (`VerticalSplitServer`)"),),
    Evaluated: (
        FieldRule("first", "the requested position, once (`VerticalSplitServer`)"),
        FieldRule(
            "values",
            "dtype and shape of the head's output, for the requested number of people; "
            f"absolute values at most {GRADIENT:g} (`ServedVerticalLearner`)",
        ),
    ),
}
