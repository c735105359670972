"""Statement, in a line, of the parties that could learn labels, inputs or heads in a run.

labels    with one cut the server receives them; with two it sees the gradients of the outputs
inputs    the server always sees the output of the head; a decoder needs the head, or a
          shadow of it
head      known to each party that receives it: the next client, or the server

In vertical split learning each party receives its own gradients, and the holder of the labels sees
the output of all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.split.leakage.defence import Defence


def exposure(
    labels_stay: bool, through_server: bool, hands: bool, defence: Defence, personal: bool = False
) -> str:
    """Return the statement for a run of clients and a server.

    Args:
        labels_stay: whether the end of the model is at the clients.
        through_server: whether heads, or their gradients, are sent to the server.
        hands: whether clients send heads to each other.
        defence: the defence of the run.
        personal: whether each client has its own head.
    """
    return f"{_labels(labels_stay, defence)}; {_inputs(through_server, hands, defence, personal)}"


def _labels(labels_stay: bool, defence: Defence) -> str:
    if defence.guards == "labels":
        given = "gradients made of them" if labels_stay else "labels"
        return f"the server is sent {given}, randomised by {defence}"
    if not labels_stay:
        return "the server is sent all labels"
    noise = f" with the noise of {defence}" if defence.guards == "gradients" else ""
    return f"the server sees gradients of the outputs{noise}, and could guess labels from them"


def _inputs(through_server: bool, hands: bool, defence: Defence, personal: bool) -> str:
    fewer = f" (which {defence} makes say less)" if defence.guards == "activations" else ""
    seen = f"the server sees what leaves the heads{fewer}"
    if personal:
        return f"{seen}, and knows of no head but how it began; nor do other clients"
    if through_server:
        return f"{seen} and is handed the heads, and could rebuild inputs with both"
    if hands:
        return (
            f"{seen}, and could rebuild inputs if it enrolled a client of its own; clients see "
            f"the heads of each other"
        )
    return f"{seen}, and knows no head unless it enrols a client of its own"


def parties_exposure(
    holder: str, others: Sequence[str], learning: Sequence[str], aligned: bool, defence: Defence
) -> str:
    """Return the statement for vertical split learning.

    Args:
        holder: name of the holder of the labels.
        others: names of the parties without labels.
        learning: names of the parties among `others` that receive gradients.
        aligned: whether the parties have aligned their people.
        defence: the defence of the run.
    """
    if not others:
        return f"{holder} has all columns and the labels, and nothing leaves it"
    fewer = f" (which {defence} makes say less)" if defence.guards == "activations" else ""
    heads = "head of" if len(others) == 1 else "heads of"
    seen = (
        f"{holder} has the labels, sees what leaves the {heads} {_and(others)}{fewer}, and could "
        f"rebuild columns if it knew a head"
    )
    people = f"; {holder} knows which of its people each of them has" if aligned else ""
    return f"{_guesses(learning, defence)}; {seen}{people}"


def _guesses(learning: Sequence[str], defence: Defence) -> str:
    """Return the clause about the parties that could guess labels."""
    if not learning:
        return "nobody is sent gradients from which labels could be guessed"
    made = f", made of labels randomised by {defence}" if defence.guards == "labels" else ""
    noise = f" with the noise of {defence}" if defence.guards == "gradients" else ""
    sees, head = ("sees", "its head") if len(learning) == 1 else ("see", "their heads")
    return (
        f"{_and(learning)} {sees} the gradients of what leaves {head}{noise}{made}, and could "
        f"guess labels from them"
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
