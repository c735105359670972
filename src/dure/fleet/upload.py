"""Cost of uploading the clients' data to the server, instead of federated training.

Each client sends all of its examples once, all starting at the same time: over its own link, and
then over the server's (`dure.fleet.server_link`). The cost is of the transfer alone, without the
training on the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dure.fleet.devices import Devices
from dure.fleet.energy import Energy
from dure.fleet.server_link import ServerLink


class UploadCost(NamedTuple):
    """Cost of an upload. bytes: of all clients. seconds: duration. joules: None if not counted."""

    bytes: int
    seconds: float
    joules: float | None


def upload(
    sizes: Sequence[int], devices: Devices, seed: int, server_mbit: float, energy: Energy
) -> UploadCost:
    """Return the cost of uploading the clients' data.

    Args:
        sizes: bytes of each client.
        devices: devices of the clients.
        seed: of the run.
        server_mbit: speed of the server's link, in megabits per second.
        energy: energy of the clients' devices.
    """
    link = ServerLink(server_mbit)
    # The server's link takes the messages in the order in which they have left their clients.
    left = sorted((size / devices.of(one, seed).up, size) for one, size in enumerate(sizes))
    ends = [link.enters(when, size) for when, size in left]
    total = sum(sizes)
    return UploadCost(total, max(ends, default=0.0), energy.joules(0.0, 0.0, total))
