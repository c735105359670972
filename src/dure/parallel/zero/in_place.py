"""Stage 3 where all ranks share memory (the backend dure, on one host).

Nothing is gathered, and nothing is copied. The parameters are views of the memory in which every
rank keeps its chunk. They are all there from the beginning of a pass to its end, and outside of
passes only kept from being used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dure.parallel.zero.away import Away
from dure.parallel.zero.changes import Changes
from dure.parallel.zero.gathering import Gathering, Unit
from dure.parallel.zero.shares import Pool
from dure.parallel.zero.wire import Wire


class InPlace(Gathering):
    """All units of a model on one rank, in memory that all ranks read."""

    in_place = True

    def __init__(self, units: list[Unit], wire: Wire, pool: Pool, changes: Changes) -> None:
        # Before the parent sends the parameters away: from then on their memory stays, and only
        # their class changes.
        for unit in units:
            for share in unit.shares:
                share.install()
        super().__init__(units, wire, pool, changes)
        # a flat list, since `bring` and `free_all` go over it in every pass
        self._kinds: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        for unit in units:
            for share, kinds in zip(unit.shares, unit.kinds, strict=True):
                self._kinds += zip(share.parameters, kinds, strict=True)

    def bring(self) -> None:
        """All parameters may be used from now on."""
        if not self.here:
            self.here = True
            for parameter, kind in self._kinds:
                parameter.__class__ = kind

    def free_all(self) -> None:
        """Nothing is freed: parameters are only kept from being used, until the next pass."""
        if self.here:
            self.changes.compare()
            self.here = False
            for parameter, _ in self._kinds:
                parameter.__class__ = Away

    def called(self, unit: Unit, outputs: Any) -> None:
        """It stays, as do all others."""

    def count(self) -> None:
        """Each takes what is not its own, once a pass, as if it had been sent."""
        for unit in self.units:
            for share in unit.shares:
                self.wire.count(share.own)

    def own_memory(self, outputs: Any) -> Any:
        """As they are: the memory of parameters stays."""
        return outputs

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves stays where it lies."""
        yield

    def begin_backward(self) -> None:
        """Units stay, so nothing has to be noted of them."""
        self.in_backward = True

    def complete(self, unit: Unit) -> None:
        """It stays."""
