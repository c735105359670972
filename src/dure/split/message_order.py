"""Order of messages of a turn: the message of each client that is due.

    the server sends    the client sends next
    Turn                Smashed of step 0
    Outputs             OutputGradients of the same step
    Gradients           HeadGradients of the same step, if all heads make the same step; else
                        Smashed of the next step, or Ended after the last step
    HeadSum             Smashed of the next step; Ended after the last step of all; nothing from a
                        client that has no batch left, until then

At most one message of a client is due. Every other message is an error of the client, except a
message that was in transit when the server rolled back a turn: that message is late, and discarded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dure.split.messages import (
    Ended,
    Envelope,
    Gradients,
    HeadGradients,
    HeadSum,
    Message,
    OutputGradients,
    Outputs,
    Smashed,
    Turn,
)

FromClient = Smashed | OutputGradients | HeadGradients | Ended


class DueMessage(NamedTuple):
    """Type and step of a message. The step of Ended is the number of steps."""

    kind: type[FromClient]
    step: int

    def __str__(self) -> str:
        if self.kind is Ended:
            return f"Ended after {self.step} steps"
        return f"{self.kind.__name__} of step {self.step + 1}"


def _said(message: FromClient) -> str:
    if isinstance(message, Ended):
        return "Ended"
    return str(DueMessage(type(message), message.step))


class DueMessages:
    """Messages that are due from all clients.

    sums: whether all heads make the same step by the sum of their gradients.
    """

    def __init__(self, sums: bool) -> None:
        self.sums = sums
        self.turns: dict[str, Turn] = {}
        """Newest turn of each client."""
        self._due: dict[str, DueMessage] = {}
        self._late: dict[str, set[int]] = {}
        """Turns that were rolled back while a message was due, by client."""

    def __contains__(self, name: str) -> bool:
        """Return whether a message of this client is due."""
        return name in self._due

    def note(self, said: Iterable[Envelope]) -> None:
        """Note messages of the server, and the answers that become due."""
        for name, message in said:
            due = self._answer(name, message)
            if due is not None:
                self._due[name] = due

    def _answer(self, name: str, message: Message) -> DueMessage | None:
        if isinstance(message, Turn):
            self.turns[name] = message
            return self._batch(message, 0)
        if isinstance(message, Outputs):
            return DueMessage(OutputGradients, message.step)
        if isinstance(message, Gradients) and self.sums:
            return DueMessage(HeadGradients, message.step)
        if isinstance(message, Gradients | HeadSum):
            return self._batch(self.turns[name], message.step + 1)
        return None

    def _batch(self, turn: Turn, step: int) -> DueMessage | None:
        if step < turn.steps:
            return DueMessage(Smashed, step)
        return DueMessage(Ended, turn.steps) if step >= turn.until else None

    def check(self, sender: str, message: Message) -> None:
        """Raise ValueError for a message of a client's turn that is not due."""
        if not isinstance(message, FromClient):
            raise ValueError(f"the server cannot process {type(message).__name__} from {sender}")
        due = self._due.get(sender)
        given = DueMessage(type(message), getattr(message, "step", -1))
        if due is None or due.kind is not given.kind or (due.kind is not Ended and due != given):
            raise ValueError(f"received {_said(message)}, but expected {due or 'nothing'}")

    def take(self, sender: str, message: Message) -> None:
        """Accept a message that is due; the client now waits. Raises the errors of `check`."""
        self.check(sender, message)
        del self._due[sender]

    def drop(self) -> None:
        """Clear all due messages, since the turns are rolled back."""
        for name in self._due:
            self._late.setdefault(name, set()).add(self.turns[name].number)
        self._due.clear()

    def is_late(self, sender: str, turn: int) -> bool:
        """Return whether this is the message that was due when its turn was rolled back."""
        late = self._late.get(sender, set())
        if turn not in late:
            return False
        # A client's messages are in order: late messages of earlier turns cannot arrive any more.
        self._late[sender] = {one for one in late if one > turn}
        return True
