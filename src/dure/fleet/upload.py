"""Cost of uploading the clients' data to the server, instead of federated training.

Each client sends all of its examples once, all starting at the same time: over its own link, and
then over the server's (`dure.fleet.server_link`). The cost is of the transfer alone, without the
training on the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.data.examples import Examples
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


SOME = 16
"""Examples that are read to measure a dataset."""


def example_bytes(examples: Examples) -> float:
    """Return the mean bytes of inputs and targets of an example; 0 without examples.

    Exact if all are alike, as in tensors; else the mean of some examples, evenly taken.
    """
    count = min(len(examples), SOME)
    if not count:
        return 0.0
    places = torch.arange(count) * len(examples) // count
    leaves = tree_leaves(examples.batch(places))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) / count
