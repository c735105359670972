"""A prediction on the device against one on a server.

    local    device
    remote   delay + example / up + server + delay + answer / down

device and server are seconds of a forward pass of one example there, delay is that of the link, one
way, and up and down are its bytes a second. The example is what the model is called with, the
answer what it returns. A remote call pays off where the device is slower than the way and the
server together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dure.fleet.devices import BYTES_PER_MBIT


class Call(NamedTuple):
    """Bytes of one example's inputs, and of the model's answer."""

    example_bytes: float
    answer_bytes: float


class Latency(NamedTuple):
    """Seconds until an answer is there."""

    local: float
    remote: float


def latency(
    call: Call,
    *,
    device_seconds: float,
    server_seconds: float,
    up_mbit: float,
    down_mbit: float,
    delay: float = 0.0,
) -> Latency:
    """How long one prediction takes on the device, and on the server.

    delay: seconds one way. Raises ValueError for times below 0 and links without speed.
    """
    if not all(0 <= one < math.inf for one in (device_seconds, server_seconds, delay, *call)):
        raise ValueError("seconds and bytes of a prediction are numbers of at least 0")
    if not (up_mbit > 0 and down_mbit > 0):
        raise ValueError(f"a link has a speed above 0, not {up_mbit} up and {down_mbit} down")
    sent = call.example_bytes / (up_mbit * BYTES_PER_MBIT)
    told = call.answer_bytes / (down_mbit * BYTES_PER_MBIT)
    return Latency(device_seconds, 2 * delay + sent + server_seconds + told)
