"""Rules for each field of each message of a party, and the place of each check.

A party that violates a rule is rejected by name, and the run ends: training needs its columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.split.alignment import Blinded, Twice
from dure.split.blame import GRADIENT
from dure.split.network.checks import Rule
from dure.split.network.parties_control import Aligned, Evaluated, Kept, Resumed
from dure.split.parties.messages import Activations

_POINTS = (
    "32 bytes each; points of the curve, of no small order; none twice, and none that was sent to "
    "the party (`PeerPoints`)"
)

RULES: Mapping[type, tuple[Rule, ...]] = {
    Resumed: (Rule("turn", "the newest, once; earlier ones are dropped (`PartiesHall`)"),),
    Blinded: (
        Rule(
            "first", "a part of the party's list that has not come, or is the same (`PeerPoints`)"
        ),
        Rule(
            "total",
            "the same in each message, as many people as at check-in at most (`PeerPoints`)",
        ),
        Rule("points", _POINTS),
    ),
    Twice: (
        Rule(
            "first", "a part of the holder's list that has not come, or is the same (`PeerPoints`)"
        ),
        Rule("points", _POINTS),
    ),
    Aligned: (),
    Activations: (
        Rule("step", "that which is under way, once (`Holder`)"),
        Rule(
            "values",
            "dtype and shape of what leaves the head, for the people of the batch; no NaN "
            "(`Holder`)",
        ),
        Rule("trains", "a truth value: whether the head wants gradients is the party's affair"),
    ),
    Kept: (Rule("step", "that which was asked for, once (`PartiesHall`)"),),
    Evaluated: (
        Rule("first", "that which was asked for, once (`PartiesHall`)"),
        Rule(
            "values",
            "dtype and shape of what leaves the head, for as many people as were asked for; "
            f"finite, below {GRADIENT:g} (`ServedParties`)",
        ),
    ),
}
