"""Outgoing messages of a site, each with the kind under which the site's log records it.

The kind is the tag of the message: "smashed", "output-gradients". Messages of every step
are frequent, and may be on disk slightly later (`dure.deploy.client.audit_log`); the line of
any other message is on disk before the message is sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from dure.split import alignment
from dure.split.messages import HeadGradients, OutputGradients, Smashed
from dure.split.network.control import Evaluated, Query
from dure.split.network.frames import Frame
from dure.split.parties.messages import Activations

Pieces = Sequence[bytes | bytearray | memoryview]

OF_EACH_STEP = (
    Smashed,
    OutputGradients,
    HeadGradients,
    Query,
    Activations,
    Evaluated,
    alignment.Blinded,
    alignment.DoubleBlinded,
)
"""Frequent messages, which do not wait for the disk."""


class ServerChannel(Protocol):
    """Connection to the server, in both directions."""

    def next(self, seconds: float | None = None) -> bytes | bytearray | memoryview: ...

    def say(self, frame: Pieces, kind: str, at_once: bool) -> None: ...

    def allow(self, most: int) -> None:
        """Set the maximum bytes of a message of the server from now on."""


def say(channel: ServerChannel, message: Frame, encoded: Pieces) -> None:
    """Send an encoded message, once the site's log has its line."""
    channel.say(encoded, kind_of(message), not isinstance(message, OF_EACH_STEP))


def kind_of(message: Frame) -> str:
    """Return the kind of a message in the log: "output-gradients" of `OutputGradients`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", str(message.__struct_config__.tag)).lower()
