"""Attacks: what clients that lie do to their data, and what they send.

n updates of a round, f of them from liars; g_i what client i would have sent honestly, mu and sigma
the mean and the deviation (with n-1) of the honest ones, coordinate by coordinate. Liars send
instead

    sign-flip:SCALE          -SCALE · g_i                                       its own
    gaussian:SIGMA           N(0, SIGMA²)                                       its own
    noise:SIGMA              g_i + N(0, SIGMA²)                                 its own
    alie:Z                   mu - Z · sigma, small enough to hide               honest, colluding
    inner-product:EPSILON    -EPSILON · mu                                      honest, colluding
    mimic                    g_h of one honest client h                         honest, colluding
    nan, inf, large:VALUE    that, in every coordinate                          its own
    none                     g_i                                                its own
    label-flip               g_i, learned from y -> classes-1-y                 its own
    backdoor:TARGET:SCALE    SCALE · g_i, learned from data with a trigger      its own

The last column is what the attack `sees`: the liar's own update, or all honest ones of the round
(omniscient). Where nobody in a round is honest, the omniscient take what the liars would have sent
honestly. An attack is a pure function of (updates, liars, seed, turn); what it costs is O(n·d)
additions for those that are omniscient, O(f·d) for the others.

Updates are lists of flat tensors, as `dure.tensors.flat` keeps parameters, and are differences
(weights after training less weights before), so that -mu is uphill; behind them is what an
algorithm sends besides, as SCAFFOLD's controls. What honest clients sent is never changed. A client
that does not answer is no attack: that is `dure.fleet.availability`.
"""

from __future__ import annotations

from dure.fleet.attacks.attack import Attack, NoAttack
from dure.fleet.attacks.blind import Gaussian, Infinite, Large, Noise, NotANumber, SignFlip
from dure.fleet.attacks.omniscient import ALIE, InnerProduct, Mimic, z_max
from dure.fleet.attacks.poisoning import Backdoor, LabelFlip
from dure.settings import read

__all__ = [
    "ALIE",
    "ATTACKS",
    "Attack",
    "Backdoor",
    "Gaussian",
    "Infinite",
    "InnerProduct",
    "LabelFlip",
    "Large",
    "Mimic",
    "NoAttack",
    "Noise",
    "NotANumber",
    "SignFlip",
    "parse_attack",
    "z_max",
]

ATTACKS: dict[str, type[Attack]] = {
    kind.name: kind
    for kind in (
        NoAttack,
        SignFlip,
        Gaussian,
        Noise,
        LabelFlip,
        ALIE,
        InnerProduct,
        Backdoor,
        Mimic,
        NotANumber,
        Infinite,
        Large,
    )
}
"""Every attack by the name its text form begins with."""


def parse_attack(text: str) -> Attack:
    """The attack that `text` names: "sign-flip:10", "alie", "nan", ... Raises ValueError for what
    is none."""
    return read(text, ATTACKS, "attack")
