"""The link of a federation's server, which all clients share.

    down   a message passes the server's link, and then its client's
    up     a message passes its client's link, and then the server's

Each direction transfers one message at a time, in order of arrival, and a message of D bytes takes
D / speed seconds: the rule of `dure.fleet.virtual_network`, by which parameter servers are
simulated. A link of infinite speed takes no time, and no message waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dure.fleet.devices import BYTES_PER_MBIT


class ServerLink:
    """The server's link, with the end of each direction's transfers. mbit: its speed each way."""

    def __init__(self, mbit: float) -> None:
        self.speed = mbit * BYTES_PER_MBIT
        self.out_free = 0.0
        self.in_free = 0.0
        self.busy = 0.0
        """Seconds of transfers, both ways together."""
        self.waited = 0.0
        """Seconds that messages have waited for the link, in total."""

    @property
    def finite(self) -> bool:
        return not math.isinf(self.speed)

    def seconds(self, nbytes: int) -> float:
        """Return the transfer time in seconds of a message on the free link."""
        return nbytes / self.speed

    def leaves(self, now: float, nbytes: int) -> float:
        """Return the time at which a message sent at `now` has left."""
        self._note(now, self.out_free, nbytes)
        self.out_free = max(self.out_free, now) + self.seconds(nbytes)
        return self.out_free

    def enters(self, now: float, nbytes: int) -> float:
        """Return the arrival time of a message that has left its client at `now`.

        Calls have to be in order of `now`.
        """
        self._note(now, self.in_free, nbytes)
        self.in_free = max(self.in_free, now) + self.seconds(nbytes)
        return self.in_free

    def _note(self, now: float, free: float, nbytes: int) -> None:
        self.waited += max(0.0, free - now)
        self.busy += self.seconds(nbytes)

    def facts(self) -> dict[str, Any]:
        """Return the link's use, for the report; nothing for a link of infinite speed."""
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
        """Restore the result of `state`."""
        self.out_free = state["out_free"]
        self.in_free = state["in_free"]
        self.busy = state["busy"]
        self.waited = state["waited"]
