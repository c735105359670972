"""What it would cost to send the clients' data to the server instead of training where they are.

Each client sends all of its examples once, from the same moment on: over its own link, and then
over the server's (`dure.fleet.server_link`). That is the moving alone: whoever has the data then
still has to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dure.fleet.devices import Devices
from dure.fleet.energy import Energy
from dure.fleet.server_link import ServerLink


class Upload(NamedTuple):
    """bytes: of all clients. seconds: until all are there. joules: None where not counted."""

    bytes: int
    seconds: float
    joules: float | None


def upload(
    sizes: Sequence[int], devices: Devices, seed: int, server_mbit: float, energy: Energy
) -> Upload:
    """What it costs to upload so many bytes of each client."""
    link = ServerLink(server_mbit)
    # In the order in which they have left their clients, the server's link takes them.
    left = sorted((size / devices.of(one, seed).up, size) for one, size in enumerate(sizes))
    ends = [link.enters(when, size) for when, size in left]
    total = sum(sizes)
    return Upload(total, max(ends, default=0.0), energy.joules(0.0, 0.0, total))
