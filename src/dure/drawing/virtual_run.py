"""Small runs under the virtual clock, whose events a picture shows.

The unit of time is a worker's gradient of one batch, forward and backward. The model is a small MLP
with random data: the events depend on the numbers of examples and bytes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from dure.collectives.group import Group
from dure.contracts.learner import Learner
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.fleet.conditions import Conditions
from dure.fleet.devices import BYTES_PER_MBIT, Device, Devices
from dure.fleet.virtual_network import HEADER, Transmission, VirtualNetwork
from dure.protocol.carrier import Carrier, Clients
from dure.protocol.server_context import ServerContext

FEATURES = 12
_HIDDEN = 16
_CLASSES = 3


@dataclass(frozen=True)
class SlowDevices(Devices):
    """Devices of which the last `slow` compute `factor` times slower.

    count: number of devices. down, up: bytes per unit of time.
    """

    name: ClassVar[str] = "slow-devices"
    count: int
    slow: int
    factor: float
    examples_per_second: float
    down: float
    up: float

    def of(self, client: int, seed: int) -> Device:
        slow = client >= self.count - self.slow
        speed = self.examples_per_second / (self.factor if slow else 1.0)
        return Device(speed, self.down, self.up)


def network() -> nn.Module:
    """Return the model of a picture."""
    return nn.Sequential(
        nn.Linear(FEATURES, _HIDDEN),
        nn.Tanh(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.Tanh(),
        nn.Linear(_HIDDEN, _CLASSES),
    )


def model_bytes(header: int = HEADER) -> int:
    """Return the bytes of a message with the whole model. header: bytes besides the weights."""
    return header + sum(parameter.nbytes for parameter in network().parameters())


def random_task(examples: int) -> Task:
    """Return a task with this number of random training examples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, FEATURES, generator=generator)
    targets = torch.randint(_CLASSES, (examples,), generator=generator)
    return Task(
        model=network,
        loss=F.cross_entropy,
        train=Examples(inputs, targets),
        test=None,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        name="picture",
    )


def conditions_of(
    count: int,
    examples: int,
    transfer: float,
    slow: int = 0,
    factor: float = 1.0,
    federated: bool = False,
) -> Conditions:
    """Return conditions in units of time.

    Args:
        count: number of devices.
        examples: examples that a device trains in a unit of time.
        transfer: units of time in which a device sends or receives the model.
        slow: number of devices that are slower.
        factor: slowness of these devices.
        federated: whether the messages are those of a federation: without headers, and with a
            server whose link takes no time. Otherwise its link takes half as long as a device's.
    """
    for what, number, least in (("transfer", transfer, 0.0), ("factor", factor, 1.0)):
        if not (math.isfinite(number) and number >= least):
            raise ValueError(f"--{what} is {number:g}: give {least:g} or more")
    if not 0 <= slow <= count:
        raise ValueError(f"--slow is {slow}: give 0 to {count}, the number of participants")
    speed = model_bytes(0 if federated else HEADER) / transfer if transfer else math.inf
    devices = SlowDevices(count, slow, factor, examples, speed, speed)
    return Conditions(
        devices=devices,
        server_mbit=math.inf if federated else 2 * speed / BYTES_PER_MBIT,
        server_examples_per_second=2.0 * examples,
    )


def context_of(
    conditions: Conditions, carrier: Callable[[Clients, int], Carrier] | None = None
) -> ServerContext:
    """Return the context of a simulated run."""
    return ServerContext(Group(), kind="clients", conditions=conditions, carrier=carrier)


def recorded_transmissions(network: VirtualNetwork) -> list[Transmission]:
    """Return a list to which the network adds every message with a payload."""
    found: list[Transmission] = []
    before = network.watch

    def watch(transmission: Transmission) -> None:
        before(transmission)
        found.append(transmission)

    network.watch = watch
    return found


def advanced(learner: Learner) -> Mapping[str, float]:
    """Run a round, and return the numbers that the learner reports."""
    numbers = learner.advance(0).numbers
    assert numbers is not None, "a simulated learner reports its clock"
    return numbers


def check_counts(most: int, **counts: int) -> None:
    """Check numbers of participants or steps; raises ValueError for a number that is too large."""
    for name, count in counts.items():
        if not 1 <= count <= most:
            raise ValueError(f"--{name.replace('_', '-')} is {count}: give 1 to {most}")
