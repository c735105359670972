"""What the parts of a divided model tell of what they should not, and what is done against it.

Meters, which know what nobody in the run knows and never change it

    labels                   labels guessed from gradients at the cut (norm, direction), and from
                             activations (clusters), as AUC
    distance_correlation     how much of the inputs is in what leaves the head
    reconstruction           inputs rebuilt from what leaves the head, by a decoder

Defences, each a frozen dataclass with a text form and one knob

    none
    marvell:POWER                  gradients: the least noise that hides which of two classes
    max-norm:SCALE                 gradients: all as long as the longest
    isotropic:RATIO                gradients: Gaussian noise, as long as RATIO times the longest
    no-peek:ALPHA                  activations: distance correlation in the head's loss
    randomised-response:EPSILON    labels: wrong with a known probability, for good

A defence of gradients guards what leaves whoever has the labels: after two cuts the client. One of
activations changes the head, and says nothing of labels. A new one is a file of its own here and a
line below; one of a user's own is a subclass of `Defence` in any file, and its text is
`my_defences.py:Mine:2`.
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
"""Every defence by the name its text form begins with."""


def parse_defence(text: str) -> Defence:
    """The defence that `text` names: "marvell:4", "no-peek:0.5", "my_defences.py:Mine", ...

    Raises ValueError for what is none.
    """
    return read(text, DEFENCES, "defence", Defence)
