"""Who could learn what in a run, in a line.

labels    with one cut the server is sent them; with two it sees the gradients of the outputs
inputs    what leaves the head is always seen by the server; a decoder needs the head, or a
          shadow of it
head      whoever is handed it: the next client, or the server

Of parties with different features each has gradients of its own, and whoever holds the labels sees
what leaves all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.split.leakage.defence import Defence


def exposure(labels_stay: bool, through_server: bool, hands: bool, defence: Defence) -> str:
    """labels_stay: whether the end of the model is with clients.

    through_server: whether heads, or their gradients, are sent to the server. hands: whether
    clients hand heads on among themselves.
    """
    return f"{_labels(labels_stay, defence)}; {_inputs(through_server, hands, defence)}"


def _labels(labels_stay: bool, defence: Defence) -> str:
    if defence.guards == "labels":
        given = "gradients made of them" if labels_stay else "labels"
        return f"the server is sent {given}, randomised by {defence}"
    if not labels_stay:
        return "the server is sent all labels"
    noise = f" with the noise of {defence}" if defence.guards == "gradients" else ""
    return f"the server sees gradients of the outputs{noise}, and could guess labels from them"


def _inputs(through_server: bool, hands: bool, defence: Defence) -> str:
    fewer = f" (which {defence} makes say less)" if defence.guards == "activations" else ""
    seen = f"the server sees what leaves the heads{fewer}"
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
    """Of parties with different features.

    holder: who has the labels. others: the parties who have none. learning: those of them who are
    sent gradients. aligned: whether they have found out whom all know.
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
    """Who could guess labels."""
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
