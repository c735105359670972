"""Latency of a prediction on the device, compared with a prediction on a server.

    local    device
    remote   delay + example / up + server + delay + answer / down

device and server are seconds of a forward pass of an example there, delay is the link's one-way
delay in seconds, and up and down are its bytes per second. The example is the model's input, the
answer its output. A remote call pays off if the device is slower than link and server together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dure.fleet.devices import BYTES_PER_MBIT


class PredictionCall(NamedTuple):
    """Bytes of an example's inputs, and of the model's answer."""

    example_bytes: float
    answer_bytes: float


class Latency(NamedTuple):
    """Seconds until the answer is available, on the device and on the server."""

    local: float
    remote: float


def latency(
    call: PredictionCall,
    *,
    device_seconds: float,
    server_seconds: float,
    up_mbit: float,
    down_mbit: float,
    delay: float = 0.0,
) -> Latency:
    """Return the latency of a prediction on the device, and on the server.

    Args:
        call: bytes of a prediction.
        device_seconds: forward pass on the device.
        server_seconds: forward pass on the server.
        up_mbit: speed of the link to the server, in megabits per second.
        down_mbit: speed of the link from the server, in megabits per second.
        delay: one-way delay of the link, in seconds.

    Raises:
        ValueError: a time or size is below 0 or infinite, or a link has no speed.
    """
    if not all(0 <= one < math.inf for one in (device_seconds, server_seconds, delay, *call)):
        raise ValueError("seconds and bytes of a prediction have to be 0 or more")
    if not (up_mbit > 0 and down_mbit > 0):
        raise ValueError(
            f"the speeds of a link have to be greater than 0, not {up_mbit} up and {down_mbit} down"
        )
    sent = call.example_bytes / (up_mbit * BYTES_PER_MBIT)
    told = call.answer_bytes / (down_mbit * BYTES_PER_MBIT)
    return Latency(device_seconds, 2 * delay + sent + server_seconds + told)
