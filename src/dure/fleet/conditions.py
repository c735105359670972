"""Conditions of clients, which a simulation sets and a deployment encounters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dure.arguments import above, at_least, between, check_ranges
from dure.contracts.world import Kind, World
from dure.fleet.arrival import Arrival, StaticData, parse_arrival
from dure.fleet.attacks import Attack, NoAttack, parse_attack
from dure.fleet.availability import Always, Availability, parse_availability
from dure.fleet.devices import Devices, Equal, parse_devices
from dure.fleet.energy import Energy, NoEnergy, parse_energy
from dure.machine.devices import AUTO, chosen_device
from dure.settings import parse_fields, read_bytes

EngineName = Literal[
    "auto",
    "loop",
    "batched",
    "loop-processes",
    "batched-processes",
    "loop-ray",
    "batched-ray",
]


@dataclass(frozen=True)
class Conditions:
    """Devices, availability and attacks of clients, and the computation of their work.

    Settings may be given as text, as on the command line.

    Args:
        devices: speed of computation and links: equal, stragglers:0.1:10, jitter:0.2:5,
            lognormal:0.5, file:PATH.
        availability: times at which clients are available: always, probability:0.8, daily:0.3,
            file:PATH.
        arrival: examples that clients have over time: still, arriving:0.1:3600, leaving:0.5:3600,
            window:0.2:3600.
        drop_out: probability that a client drops out before it has finished its assignment.
        attack: attack of malicious clients on updates or data: none, sign-flip, gaussian,
            label-flip, alie, inner-product, backdoor, ...
        attackers: number of malicious clients, or their share if below 1.
        attackers_change: draw other malicious clients in every round.
        engine: engine of local training; auto chooses by the model and the size of a round.
        processes: number of training processes, of this machine or of a Ray cluster; one per core
            by default.
        server_mbit: speed of each server's link, which all clients share, in megabits per second
            each way; with inf transfers take no time.
        server_examples_per_second: training speed of split learning's server, in examples per
            second of the whole model; with inf computation takes no time.
        energy: joules of a client's operations and bytes: joules:1e-10:2e-6:9e-6 for an operation,
            a byte down and a byte up; none does not count.
        transfer_budget: bytes that each client may receive and send in the run, such as 100MB; a
            client without budget is not asked any more.
        keep_updates: rounds of which every update is stored in the run folder, with the examples of
            its training, for dure audit; 0 stores none.
        deadline: seconds without a training step after which a training process, of this machine or
            of a Ray cluster, counts as hung, and the run ends with an error that names the client.
        device: device on which clients and server are computed: cpu, cuda, cuda:1; auto, a GPU if
            there is one, else the CPU; by default the device of the task's model.
    """

    devices: Devices = field(default_factory=Equal)
    availability: Availability = field(default_factory=Always)
    arrival: Arrival = field(default_factory=StaticData)
    drop_out: float = field(default=0.0, metadata=between(0, 1, "[)"))
    attack: Attack = field(default_factory=NoAttack)
    attackers: float = 0.0
    attackers_change: bool = False
    engine: EngineName = "auto"
    processes: int | None = field(default=None, metadata=at_least(1))
    server_mbit: float = field(default=math.inf, metadata=above(0))
    server_examples_per_second: float = field(default=math.inf, metadata=above(0))
    energy: Energy = field(default_factory=NoEnergy)
    transfer_budget: int | str | None = None
    keep_updates: int = field(default=0, metadata=at_least(0))
    deadline: float = field(default=60.0, metadata=above(0))
    device: str | None = None

    def __post_init__(self) -> None:
        parse_fields(
            self,
            {
                "devices": parse_devices,
                "availability": parse_availability,
                "arrival": parse_arrival,
                "attack": parse_attack,
                "energy": parse_energy,
                "transfer_budget": read_bytes,
            },
        )
        check_ranges(self)
        if not self.attackers >= 0 or (self.attackers > 1 and self.attackers % 1):
            raise ValueError(
                f"attackers is {self.attackers}, but it has to be an integer, or a share below 1"
            )
        # "attackers" without an attack is more likely a forgotten option than an intention.
        if isinstance(self.attack, NoAttack) != (self.attackers == 0):
            raise ValueError(
                "an attack needs attackers, and attackers need an attack: give both, such as "
                "sign-flip and 4"
            )
        if self.attackers_change and self.attack.poisons:
            raise ValueError(
                f"{self.attack} changes examples once, before training: its attackers cannot change"
            )
        budget = self.transfer_budget
        if not (budget is None or (isinstance(budget, int) and budget > 0)):
            raise ValueError(
                f"transfer_budget is {budget}, but it has to be a number of bytes above 0"
            )
        if self.device is not None:
            there = chosen_device(self.device)
            # Stored as resolved, so that the run folder has the choice on this machine.
            if self.device == AUTO:
                object.__setattr__(self, "device", there.type)

    @property
    def bytes_each(self) -> int | None:
        """Transfer budget in bytes; None without a budget."""
        budget = self.transfer_budget
        assert not isinstance(budget, str)  # parsed in `__post_init__`
        return budget

    def told(self) -> list[str]:
        """Return the conditions that are not ideal: "devices stragglers:0.1:10", "drop out 0.3".

        A device other than the CPU follows them.
        """
        ideal = Conditions()
        names = (
            "devices",
            "availability",
            "arrival",
            "drop_out",
            "attack",
            "attackers",
            "server_mbit",
            "server_examples_per_second",
            "energy",
            "transfer_budget",
        )
        return [
            f"{name.replace('_', ' ')} {getattr(self, name)}"
            for name in names
            if getattr(self, name) != getattr(ideal, name)
        ] + ([] if self.device in (None, "cpu") else [f"on {self.device}"])


class ClientWorld(World):
    """World of a server with clients. A subclass defines `name`, `conditions` and `run`."""

    kind: ClassVar[Kind] = "clients"

    @property
    def conditions(self) -> Conditions:
        """Conditions of the clients."""
        raise NotImplementedError(f"{type(self).__name__} has no property conditions")


def conditions_of(world: World) -> Conditions | None:
    """Return the conditions of a world's clients; None in a world without clients."""
    return world.conditions if isinstance(world, ClientWorld) else None
