"""Devices of clients: speed of computation, and speed of links.

A client that receives D bytes, processes n examples and sends U bytes takes D / down + n / speed +
U / up seconds. A device is a pure function of (setting, client, seed): no state is stored for
clients that do not take part. If a device's speed varies over time, the middle term is longer by a
factor that is a pure function of (setting, client, piece of work, seed).

    equal:EXAMPLES_PER_SECOND:DOWN_MBIT:UP_MBIT   all devices equal
    stragglers:SHARE:FACTOR   each client, with this probability, computes FACTOR times slower
    jitter:SHARE:FACTOR       each piece of work, with this probability, takes FACTOR times longer
    lognormal:SIGMA           speed · exp(SIGMA·z), both links · exp(SIGMA·z'); z, z' ~ N(0, 1)
    file:PATH                 CSV with client,examples_per_second,down_mbit,up_mbit

A piece of work is a step of a parameter server's worker, or an assignment of a federation's client.

Stragglers, jitter and lognormal also take the values of equal, after their own, such as
`stragglers:0.1:10:50:6:2`: for stragglers the values of all other clients, for jitter the values of
work at normal speed, for lognormal the medians.

Defaults: links of 6 Mbit/s down and 2 Mbit/s up, the 0.75 and 0.25 megabytes per second that J.
Wang et al., "A Field Guide to Federated Optimization", 2021, estimate for phones of a deployed
system. 100 examples per second are of the order of a small convolutional network on a phone; the
number depends on the model more than on the phone, so measure yours. Stragglers: a tenth of the
clients, ten times slower. Jitter: a fifth of the work, five times longer. Lognormal: F. Lai et al.,
"FedScale", ICML 2022, show speeds of phones that differ by more than an order of magnitude; with
sigma 1 the middle 90 % differ by a factor of 27.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from dure.arguments import NamedSettings, above, at_least, between
from dure.errors import DataError
from dure.fleet.table import in_order, read_table
from dure.randomness.hashed_numbers import normal, uniform
from dure.settings import listed, read, write

_SPEED = 100.0
_DOWN = 6.0
_UP = 2.0
BYTES_PER_MBIT = 125_000.0
"""Bytes in a megabit of 10^6 bits."""


class Device(NamedTuple):
    """Speed of a client's computation and of its link.

    examples_per_second: of training. down, up: receiving and sending speed of the link, in bytes
    per second.
    """

    examples_per_second: float
    down: float
    up: float

    def seconds(self, examples: int, bytes_down: int, bytes_up: int) -> tuple[float, float, float]:
        """Return the durations (download, compute, upload) in seconds; they follow one another."""
        return bytes_down / self.down, examples / self.examples_per_second, bytes_up / self.up


@dataclass(frozen=True)
class Devices(NamedSettings):
    """Base class of device settings, with a name, a text form, and `of`."""

    def of(self, client: int, seed: int) -> Device:
        """Return the device of `client`; every call returns the same device."""
        raise NotImplementedError

    def slowness(self, client: int, work: int, seed: int) -> float:
        """Return the slowdown factor of a client's `work`-th piece of work, at least 1."""
        return 1.0

    def __str__(self) -> str:
        """Return the text that `parse_devices` reads."""
        return write(self)


@dataclass(frozen=True)
class Equal(Devices):
    """Equal devices for all clients. "inf" is no time at all."""

    name: ClassVar[str] = "equal"
    examples_per_second: float = field(default=_SPEED, metadata=above(0))
    down_mbit: float = field(default=_DOWN, metadata=above(0))
    up_mbit: float = field(default=_UP, metadata=above(0))

    def of(self, client: int, seed: int) -> Device:
        return _device(self.examples_per_second, self.down_mbit, self.up_mbit)


@dataclass(frozen=True)
class Stragglers(Devices):
    """Devices of which some compute `factor` times slower, with normal links.

    share: probability with which a client is a straggler, so about this share of many clients.
    """

    name: ClassVar[str] = "stragglers"
    share: float = field(default=0.1, metadata=between(0, 1))
    factor: float = field(default=10.0, metadata=at_least(1, finite=True))
    examples_per_second: float = field(default=_SPEED, metadata=above(0))
    down_mbit: float = field(default=_DOWN, metadata=above(0))
    up_mbit: float = field(default=_UP, metadata=above(0))

    def of(self, client: int, seed: int) -> Device:
        slow = uniform(seed, "straggler", client) < self.share
        speed = self.examples_per_second / self.factor if slow else self.examples_per_second
        return _device(speed, self.down_mbit, self.up_mbit)


@dataclass(frozen=True)
class Jitter(Devices):
    """Equal devices whose computation is at times `factor` times slower.

    share: probability of slow work, drawn for each client and each piece of work.
    """

    name: ClassVar[str] = "jitter"
    share: float = field(default=0.2, metadata=between(0, 1))
    factor: float = field(default=5.0, metadata=at_least(1, finite=True))
    examples_per_second: float = field(default=_SPEED, metadata=above(0))
    down_mbit: float = field(default=_DOWN, metadata=above(0))
    up_mbit: float = field(default=_UP, metadata=above(0))

    def of(self, client: int, seed: int) -> Device:
        return _device(self.examples_per_second, self.down_mbit, self.up_mbit)

    def slowness(self, client: int, work: int, seed: int) -> float:
        return self.factor if uniform(seed, "slow work", client, work) < self.share else 1.0


@dataclass(frozen=True)
class Lognormal(Devices):
    """Devices with lognormal speeds around their medians.

    A client's two links have the same factor, independent of the factor of its computation.

    sigma: the standard deviation of the logarithm; with 0 all devices are equal.
    """

    name: ClassVar[str] = "lognormal"
    sigma: float = field(default=1.0, metadata=between(0, 10))
    examples_per_second: float = field(default=_SPEED, metadata=above(0))
    down_mbit: float = field(default=_DOWN, metadata=above(0))
    up_mbit: float = field(default=_UP, metadata=above(0))

    def of(self, client: int, seed: int) -> Device:
        # Two draws: computation and link are independent. The medians are the values of `equal`.
        speed = math.exp(self.sigma * normal(seed, "device speed", client))
        link = math.exp(self.sigma * normal(seed, "device link", client))
        return _device(self.examples_per_second * speed, self.down_mbit * link, self.up_mbit * link)


@dataclass(frozen=True)
class DevicesFile(Devices):
    """Measured devices.

    path: a CSV file with the columns client,examples_per_second,down_mbit,up_mbit.

    Client k has the device in row k, modulo the number of rows; if all names are whole numbers, in
    numerical order.

    Raises DataError if the file cannot be read, or a line is not a client's name and three positive
    numbers.
    """

    name: ClassVar[str] = "file"
    path: str = ""

    def __post_init__(self) -> None:
        found: dict[str, Device] = {}
        for line, client, values in read_table(self.path, _COLUMNS):
            if client in found:
                raise DataError(f"{self.path}, line {line}: the client {client!r} occurs twice")
            if not all(value > 0 for value in values):
                raise DataError(
                    f"{self.path}, line {line}: speeds have to be positive numbers, not {values}"
                )
            found[client] = _device(*values)
        # The class is frozen, and the devices are no field: they are read from the file that `path`
        # names.
        object.__setattr__(self, "_devices", [found[client] for client in in_order(list(found))])

    def of(self, client: int, seed: int) -> Device:
        devices: list[Device] = self._devices  # type: ignore[attr-defined]
        return devices[client % len(devices)]


_COLUMNS = ("client", "examples_per_second", "down_mbit", "up_mbit")

DEVICES: dict[str, type[Devices]] = listed(globals(), Devices)
"""Built-in settings by the name with which their text form begins."""


def parse_devices(text: str) -> Devices:
    """Return the devices that `text` names: "equal", "stragglers:0.1:10", ...

    Raises ValueError for any other text.
    """
    return read(text, DEVICES, "device setting", Devices)


def _device(examples_per_second: float, down_mbit: float, up_mbit: float) -> Device:
    return Device(examples_per_second, down_mbit * BYTES_PER_MBIT, up_mbit * BYTES_PER_MBIT)
