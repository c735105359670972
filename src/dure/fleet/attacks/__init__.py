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
(weights after training less weights before), so that -mu is uphill; after them is what an algorithm
sends besides, such as SCAFFOLD's controls. What honest clients sent is never changed. A client that
does not answer is no attack: that is `dure.fleet.availability`.

A new one is a file of its own here and a line below. One of a user's own is a subclass of `Attack`
in any file, and its text is `my_attacks.py:Mine:2`.
"""

from __future__ import annotations

from dure.fleet.attacks.attack import Attack as Attack
from dure.fleet.attacks.omniscient import z_max as z_max
from dure.settings import listed, read

# In the order in which messages list them.
# isort: off
from dure.fleet.attacks.attack import NoAttack as NoAttack
from dure.fleet.attacks.blind import SignFlip as SignFlip
from dure.fleet.attacks.blind import Gaussian as Gaussian
from dure.fleet.attacks.blind import Noise as Noise
from dure.fleet.attacks.poisoning import LabelFlip as LabelFlip
from dure.fleet.attacks.omniscient import ALIE as ALIE
from dure.fleet.attacks.omniscient import InnerProduct as InnerProduct
from dure.fleet.attacks.poisoning import Backdoor as Backdoor
from dure.fleet.attacks.omniscient import Mimic as Mimic
from dure.fleet.attacks.blind import NotANumber as NotANumber
from dure.fleet.attacks.blind import Infinite as Infinite
from dure.fleet.attacks.blind import Large as Large
# isort: on

ATTACKS: dict[str, type[Attack]] = listed(globals(), Attack)
"""Every attack by the name its text form begins with."""


def parse_attack(text: str) -> Attack:
    """The attack that `text` names: "sign-flip:10", "alie", "my_attacks.py:Mine", ...

    Raises ValueError for what is none.
    """
    return read(text, ATTACKS, "attack", Attack)
