"""Memory that the processes of a host share, for the tensors of their messages.

Each process has a pool (`dure.collectives.shared_memory.pool`), which others of the same host map.
So a gradient that lies in its worker's pool is not sent: the server reads it there. And weights
that a worker has pulled its server writes where the worker wants them.

    push    the worker's copy into its pool, and the server's reading       d bytes, once each
    pull    the server's copy into the worker's pool                        d bytes, once

What of a worker's pool is free again when, `rooms` knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from dure.collectives.hosts import name_of_this_host
from dure.collectives.shared_memory.pool import Mapping, open_of, pool
from dure.parameter_server.processes.frames import Place

_MOST_VIEWS = 256


class Card(msgspec.Struct, frozen=True):
    """Where a process is: its host, its memory there, and where it listens.

    key: by which others see whether it has the same `DURE_KEY`; empty without one.
    """

    name: str
    host: str
    process: int
    pool: int
    nbytes: int
    address: tuple[str, int]
    key: str = ""


def own_card(name: str, address: tuple[str, int], key: str = "") -> Card:
    """This process's."""
    own = pool()
    # Processes of different users may not open each other's files in /proc.
    host = f"{name_of_this_host()} {os.getuid()}"
    return Card(name, host, os.getpid(), own.descriptor, own.nbytes, address, key)


class Memory:
    """The memory of the processes with these cards, as far as it can be seen from here."""

    def __init__(self, name: str, cards: dict[str, Card]) -> None:
        self.name = name
        self.cards = cards
        self._maps: dict[str, Mapping] = {name: pool().mapping}
        self._views: dict[tuple[Place, torch.dtype, int], Tensor] = {}
        """What was looked at."""

    def see(self, others: Iterable[str]) -> None:
        """Maps the memory of those that are on this host, now.

        Later is too late where they may have died: a gradient in the memory of a dead worker can
        still be read by all that had mapped it.
        """
        for other in others:
            self._map(other)

    def shares(self, other: str) -> bool:
        """Whether another process is on this host, so that both see each other's memory."""
        return self.cards[other].host == self.cards[self.name].host

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where a tensor lies in memory that is shared; None elsewhere."""
        if not tensor.is_cpu or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        nbytes = tensor.nbytes
        for owner, there in self._maps.items():
            offset = address - there.address
            if offset >= 0 and offset + nbytes <= there.nbytes:
                return Place(owner, offset)
        return None

    def look(self, place: Place, dtype: torch.dtype, count: int) -> Tensor | None:
        """So many elements at a place, as a vector; None where there are none."""
        # Rooms are used again and again, and a view takes longer to make than to find.
        found = self._views.get((place, dtype, count))
        if found is None:
            found = self._view(place, dtype, count)
            if found is not None:
                if len(self._views) >= _MOST_VIEWS:
                    self._views.clear()
                self._views[place, dtype, count] = found
        return found

    def _view(self, place: Place, dtype: torch.dtype, count: int) -> Tensor | None:
        there = self._map(place.owner)
        size = count * dtype.itemsize
        if there is None or place.offset < 0 or place.offset + size > there.nbytes:
            return None
        if place.offset % dtype.itemsize:
            return None
        return there.tensor()[place.offset : place.offset + size].view(dtype)

    def _map(self, owner: str) -> Mapping | None:
        if owner not in self._maps:
            card = self.cards.get(owner)
            if card is None or not self.shares(owner):
                return None
            try:
                descriptor = open_of(card.process, card.pool)
            except OSError:
                return None
            try:
                self._maps[owner] = Mapping(descriptor, card.nbytes)
            finally:
                os.close(descriptor)
        return self._maps[owner]
