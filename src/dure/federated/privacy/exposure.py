"""Who could learn what of a client's data in a federation, in sentences, for the report.

What is said here follows from what travels, and not from what anybody promises. Whether somebody
does learn it is another question, which attacks answer (`dure.federated.privacy.attacks`).
"""

from __future__ import annotations

from typing import NamedTuple

from dure.federated.privacy.choice import Privacy
from dure.federated.privacy.secure_aggregation.settings import SecureAggregationPlus


class Exposure(NamedTuple):
    """who: could learn; what: of a client's data."""

    who: str
    what: str


def exposure(privacy: Privacy, roster: bool = False) -> list[Exposure]:
    """Of everybody who gets something. roster: whether clients know each other by their owner's."""
    # A few neighbours of each could all be the server's, whoever has signed who they are.
    lies = roster and not isinstance(privacy.secure, SecureAggregationPlus)
    return [
        Exposure("the server", _server(privacy, lies)),
        Exposure("other clients", "the model of each round in which they take part"),
        Exposure("whoever gets the model", _model(privacy)),
    ]


def _server(privacy: Privacy, lies: bool) -> str:
    """What the server sees of a client."""
    secure, user = privacy.secure, privacy.user
    if secure is not None:
        trust = (
            "also if it lies, as long as fewer than a third of a round's clients help it"
            if lies
            else "as long as it follows the protocol (semi-honest)"
        )
        seen = (
            f"the sum of the updates of a round, of {secure.minimum} clients or more; who was "
            f"asked, who took part, and when; no single update, number of examples or loss: {trust}"
        )
        if user is not None and user.where == "distributed":
            return f"{seen}; the sum has the noise of all clients in it already"
        return seen
    if user is not None and user.where == "local":
        return "each client's update after the client has added its own noise"
    seen = "each client's update, how many examples it has, its loss, and when it was there"
    if user is not None:
        return f"{seen}: noise is added after that, so that the server has to be trusted"
    if privacy.example is not None:
        return f"{seen}; the update has the noise of its steps in it"
    return f"{seen}: from an update examples can be rebuilt, and it can be told who is among them"


def _model(privacy: Privacy) -> str:
    """What a model tells of those who trained it."""
    if privacy.user is not None:
        return "of any client no more than the epsilon that is told allows"
    if privacy.example is not None:
        return "of any example no more than the epsilon that is told allows"
    return "whatever the model has kept of the data: nothing bounds that"
