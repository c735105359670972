"""Attacks: changes of malicious clients' data, and forgeries of their updates.

n updates of a round, f of them from malicious clients; g_i is the honest update of client i, mu and
sigma the mean and the standard deviation (with n-1) of the honest updates, coordinate by
coordinate. Malicious clients send instead

    sign-flip:SCALE          -SCALE · g_i                                       own
    gaussian:SIGMA           N(0, SIGMA²)                                       own
    noise:SIGMA              g_i + N(0, SIGMA²)                                 own
    alie:Z                   mu - Z · sigma, small enough to hide               honest, colluding
    inner-product:EPSILON    -EPSILON · mu                                      honest, colluding
    mimic                    g_h of an honest client h                          honest, colluding
    nan, inf, large:VALUE    this value in every coordinate                     own
    none                     g_i                                                own
    label-flip               g_i, learned from y -> classes-1-y                 own
    backdoor:TARGET:SCALE    SCALE · g_i, learned from data with a trigger      own

The last column is the attack's knowledge, `sees`: the malicious client's own update, or all honest
updates of the round (omniscient). In a round without honest clients, omniscient attacks use the
honest updates of the malicious clients. An attack is a pure function of (updates, liars, seed,
turn). Cost: O(n·d) additions for omniscient attacks, O(f·d) for the others.

Updates are lists of flat tensors, as `dure.tensors.flat` stores parameters, and are differences
(weights after training minus weights before), so that -mu is uphill; an algorithm's extras, such as
SCAFFOLD's controls, follow them. Honest updates are never changed. A client that does not answer is
not an attack: `dure.fleet.availability` simulates it.

A new attack is a file in this folder and a line below. A user-defined attack is a subclass of
`Attack` in any file; its text is `my_attacks.py:Mine:2`.
"""

from __future__ import annotations

from dure.fleet.attacks.attack import Attack as Attack
from dure.fleet.attacks.omniscient import z_max as z_max
from dure.settings import listed, read

# In the order in which messages list them.
# isort: off
from dure.fleet.attacks.attack import NoAttack as NoAttack
from dure.fleet.attacks.own_update import SignFlip as SignFlip
from dure.fleet.attacks.own_update import Gaussian as Gaussian
from dure.fleet.attacks.own_update import AdditiveNoise as AdditiveNoise
from dure.fleet.attacks.poisoning import LabelFlip as LabelFlip
from dure.fleet.attacks.omniscient import ALIE as ALIE
from dure.fleet.attacks.omniscient import InnerProduct as InnerProduct
from dure.fleet.attacks.poisoning import Backdoor as Backdoor
from dure.fleet.attacks.omniscient import Mimic as Mimic
from dure.fleet.attacks.own_update import NotANumber as NotANumber
from dure.fleet.attacks.own_update import Infinite as Infinite
from dure.fleet.attacks.own_update import Large as Large
# isort: on

ATTACKS: dict[str, type[Attack]] = listed(globals(), Attack)
"""Built-in attacks by the name with which their text form begins."""


def parse_attack(text: str) -> Attack:
    """Return the attack that `text` names: "sign-flip:10", "alie", "my_attacks.py:Mine", ...

    Raises ValueError for any other text.
    """
    return read(text, ATTACKS, "attack", Attack)
