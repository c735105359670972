"""Stage 3 for ranks that share memory (the backend dure, on one host).

Nothing is gathered or copied. The parameters are views of the memory that holds the chunks of all
ranks. All parameters are available from the beginning of a pass to its end; outside passes only
their use is prevented.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dure.parallel.zero.change_detection import ParameterChanges
from dure.parallel.zero.chunk_collectives import ChunkCollectives
from dure.parallel.zero.gathering import GatherUnit, UnitGathering
from dure.parallel.zero.partitioned_parameters import AbsentParameter
from dure.parallel.zero.shares import BufferPool


class InPlaceUnits(UnitGathering):
    """All units of a model on this rank, in memory that all ranks read."""

    in_place = True

    def __init__(
        self,
        units: list[GatherUnit],
        wire: ChunkCollectives,
        pool: BufferPool,
        changes: ParameterChanges,
    ) -> None:
        # Before the parent class removes the elements: from then on their memory stays, and only
        # the class of the parameters changes.
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
        """Make all parameters available from now on."""
        if not self.here:
            self.here = True
            for parameter, kind in self._kinds:
                parameter.__class__ = kind

    def free_all(self) -> None:
        """Prevent the use of parameters until the next pass; no memory is freed."""
        if self.here:
            self.changes.compare()
            self.here = False
            for parameter, _ in self._kinds:
                parameter.__class__ = AbsentParameter

    def called(self, unit: GatherUnit, outputs: Any) -> None:
        """Do nothing: units stay until the end of the pass."""

    def count(self) -> None:
        """Count the bytes of the other ranks' chunks, once a pass, as if they had been sent."""
        for unit in self.units:
            for share in unit.shares:
                self.wire.count(share.own)

    def own_memory(self, outputs: Any) -> Any:
        """Return the outputs unchanged: the memory of parameters stays."""
        return outputs

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager without effect: autograd saves views, whose memory stays."""
        yield

    def begin_backward(self) -> None:
        """Begin a backward pass; units need no preparation, because they stay."""
        self.in_backward = True

    def complete(self, unit: GatherUnit) -> None:
        """Do nothing: units stay until the end of the pass."""
