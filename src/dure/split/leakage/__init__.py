"""Leakage in split learning: attacks that measure it, and defences against it.

Meters use data that no participant has, and do not change the run:

    labels                   labels guessed from gradients at the cut (norm, direction), and from
                             activations (clusters), as AUC
    distance_correlation     dependence between the inputs and the output of the head
    reconstruction           inputs rebuilt by a decoder from the output of the head

Defences, each a frozen dataclass with a text form and a single parameter:

    none
    marvell:POWER                  gradients: the least noise that hides which of two classes
    max-norm:SCALE                 gradients: all as long as the longest
    isotropic:RATIO                gradients: Gaussian noise, as long as RATIO times the longest
    no-peek:ALPHA                  activations: distance correlation in the head's loss
    randomised-response:EPSILON    labels: wrong with a known probability, for the whole run

A defence of gradients protects the outgoing gradients of the party with the labels: with two cuts,
the client. A defence of activations changes the head and does not protect labels. A new built-in
defence is a file in this folder and a line below; a user's defence is a subclass of `Defence` in
any file, with the text form `my_defences.py:Mine:2`.
"""

from __future__ import annotations

from dure.settings import listed, read
from dure.split.leakage.defence import Defence as Defence

# In the order in which messages list them.
# isort: off
from dure.split.leakage.defence import NoDefence as NoDefence
from dure.split.leakage.marvell import Marvell as Marvell
from dure.split.leakage.noise import MaxNorm as MaxNorm
from dure.split.leakage.noise import Isotropic as Isotropic
from dure.split.leakage.no_peek import NoPeek as NoPeek
from dure.split.leakage.randomised_response import RandomisedResponse as RandomisedResponse
# isort: on

DEFENCES: dict[str, type[Defence]] = listed(globals(), Defence)
"""All defences, by the name at the start of their text form."""


def parse_defence(text: str) -> Defence:
    """Return the defence that `text` names: "marvell:4", "no-peek:0.5", "my_defences.py:Mine", ...

    Raises ValueError for text that names no defence.
    """
    return read(text, DEFENCES, "defence", Defence)
