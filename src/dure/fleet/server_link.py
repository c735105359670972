"""The link of a federation's server, which all clients share.

    down   a message leaves by the server's link, and then comes in by its client's
    up     it leaves by its client's link, and then comes in by the server's

Each way has one message at a time, in the order in which they come, and a message of D bytes takes
D / speed seconds there: the rule of `dure.fleet.virtual`, by which parameter servers are simulated.
A link without an end takes no time, and nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dure.fleet.devices import BYTES_PER_MBIT


class ServerLink:
    """The link, and until when each way of it is taken. mbit: its speed each way."""

    def __init__(self, mbit: float) -> None:
        self.speed = mbit * BYTES_PER_MBIT
        self.out_free = 0.0
        self.in_free = 0.0
        self.busy = 0.0
        """Seconds that it was busy, both ways together."""
        self.waited = 0.0
        """Seconds that messages have waited for it, all together."""

    @property
    def finite(self) -> bool:
        return not math.isinf(self.speed)

    def seconds(self, nbytes: int) -> float:
        """How long a message takes that has it for itself."""
        return nbytes / self.speed

    def leaves(self, now: float, nbytes: int) -> float:
        """When a message that is sent now has left."""
        self._note(now, self.out_free, nbytes)
        self.out_free = max(self.out_free, now) + self.seconds(nbytes)
        return self.out_free

    def enters(self, now: float, nbytes: int) -> float:
        """When a message that has left its client now is here. Later ones are asked for later."""
        self._note(now, self.in_free, nbytes)
        self.in_free = max(self.in_free, now) + self.seconds(nbytes)
        return self.in_free

    def _note(self, now: float, free: float, nbytes: int) -> None:
        self.waited += max(0.0, free - now)
        self.busy += self.seconds(nbytes)

    def facts(self) -> dict[str, Any]:
        """For the report; nothing of a link without an end."""
        if not self.finite:
            return {}
        return {"server_link": {"busy_seconds": self.busy, "waited_seconds": self.waited}}

    def state(self) -> dict[str, float]:
        return {
            "out_free": self.out_free,
            "in_free": self.in_free,
            "busy": self.busy,
            "waited": self.waited,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`."""
        self.out_free = state["out_free"]
        self.in_free = state["in_free"]
        self.busy = state["busy"]
        self.waited = state["waited"]
