"""Rules for each field of each message of a party, and the place of each check.

A party that violates a rule is rejected by name, and the run ends: training needs its columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.split.alignment import Blinded, DoubleBlinded
from dure.split.blame import GRADIENT
from dure.split.network.checks import FieldRule
from dure.split.network.parties_control import Aligned, Evaluated, Resumed, StateSaved
from dure.split.parties.messages import Activations

_POINTS = (
    "32 bytes each; points of the curve, of no small order; none twice, and none that was sent to "
    "the party (`PeerPoints`)"
)

RULES: Mapping[type, tuple[FieldRule, ...]] = {
    Resumed: (
        FieldRule("turn", "the newest, once; earlier ones are dropped (`VerticalSplitServer`)"),
    ),
    Blinded: (
        FieldRule(
            "first", "a part of the party's list that has not come, or is the same (`PeerPoints`)"
        ),
        FieldRule(
            "total",
            "the same in each message, as many people as at check-in at most (`PeerPoints`)",
        ),
        FieldRule("points", _POINTS),
    ),
    DoubleBlinded: (
        FieldRule(
            "first", "a part of the holder's list that has not come, or is the same (`PeerPoints`)"
        ),
        FieldRule("points", _POINTS),
    ),
    Aligned: (),
    Activations: (
        FieldRule("step", "that which is under way, once (`LabelHolder`)"),
        FieldRule(
            "values",
            "dtype and shape of what leaves the head, for the people of the batch; no NaN "
            "(`LabelHolder`)",
        ),
        FieldRule(
            "trains", "a truth value: whether the head wants gradients is the party's affair"
        ),
    ),
    StateSaved: (FieldRule("step", "that which was asked for, once (`VerticalSplitServer`)"),),
    Evaluated: (
        FieldRule("first", "that which was asked for, once (`VerticalSplitServer`)"),
        FieldRule(
            "values",
            "dtype and shape of what leaves the head, for as many people as were asked for; "
            f"finite, below {GRADIENT:g} (`ServedVerticalLearner`)",
        ),
    ),
}
