"""Worlds of a server with clients, which are under conditions."""

from __future__ import annotations

from typing import ClassVar

from dure.contracts.world import Kind, World
from dure.fleet.conditions import Conditions


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
