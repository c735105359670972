"""Exposure of a client's data in a federation, in sentences for the report.

The sentences follow from the messages that travel, not from promises. The attacks measure how much
a recipient can learn in practice (`dure.federated.attacks`).
"""

from __future__ import annotations

from typing import NamedTuple

from dure.federated.privacy.privacy_settings import Privacy
from dure.federated.privacy.secure_aggregation.settings import SecureAggregationPlus


class Exposure(NamedTuple):
    """A recipient (`who`), and the part of a client's data it could learn (`what`)."""

    who: str
    what: str


def exposure(privacy: Privacy, roster: bool = False) -> list[Exposure]:
    """Return the exposure to each recipient. `roster`.

    Clients verify each other's identity keys.
    """
    # In SecAgg+ all neighbours of a client could belong to the server, in spite of signed keys.
    lies = roster and not isinstance(privacy.secure, SecureAggregationPlus)
    return [
        Exposure("the server", _server(privacy, lies)),
        Exposure("other clients", "the model of each round in which they take part"),
        Exposure("whoever gets the model", _model(privacy)),
    ]


def _server(privacy: Privacy, lies: bool) -> str:
    """Return a description of the server's view of a client."""
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
    """Return a description of the information about its clients that a model contains."""
    if privacy.user is not None:
        return "of any client no more than the epsilon that is told allows"
    if privacy.example is not None:
        return "of any example no more than the epsilon that is told allows"
    return "whatever the model has kept of the data: nothing bounds that"
