"""The flight recorder: a recorded run, gone through again from its journal.

Nobody is served, nothing is written. The events of the journal are applied as they were, with the
updates that came; so the server makes the same models, to the last bit.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dure.contracts.strategy import Interrupted, Kind, Place, World
from dure.errors import RunFolderError
from dure.fleet.budget import Budget
from dure.fleet.conditions import Conditions
from dure.protocol.carrier import Carrier
from dure.protocol.messages import Measure, Measured
from dure.wire.layout import Federation
from dure.worlds.network.clock import Clock
from dure.worlds.network.journal import Event, Journal, backup
from dure.worlds.network.server.carrier import COHORT, ONCE, NetworkCarrier
from dure.worlds.network.server.desk import Desk
from dure.worlds.network.server.events import LOOK, Events
from dure.worlds.network.server.model_digests import FILE, ModelDigests
from dure.worlds.network.server.shelf import Shelf
from dure.worlds.network.updates import Updates
from dure.worlds.network.world import ENGINE, machine, run_server

Value = TypeVar("Value")


@dataclass(frozen=True)
class Replay(World):
    """The clients of a recorded run, as the journal in `folder` has them."""

    folder: Path
    run_id: str

    name: ClassVar[str] = "replay"
    kind: ClassVar[Kind] = "clients"

    @property
    def serves(self) -> bool:
        return True

    @property
    def conditions(self) -> Conditions:
        return Conditions(engine=ENGINE)

    @cached_property
    def models(self) -> ModelDigests:
        """The digests that the run has written down, with which its models are compared."""
        return ModelDigests(self.folder / FILE, writes=False)

    def run(
        self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        return run_server(program, report, self.conditions, self._carrier)

    def _carrier(self, federation: Federation, place: Place) -> Carrier:
        copy = Path(place.ending.enter_context(tempfile.TemporaryDirectory(prefix="dure-")))
        backup(self.folder, copy / "journal.db")
        if (self.folder / COHORT).exists():
            shutil.copy(self.folder / COHORT, copy / COHORT)
        clock = Clock()
        journal = Journal(copy, clock, self.run_id)
        place.ending.callback(journal.close)
        return Again(
            federation=federation,
            folder=copy,
            journal=journal,
            clock=clock,
            updates=Updates(self.folder / "updates"),
            desk=Desk(clock.now),
            shelf=Shelf(),
            machine=machine(federation.threads),
            start_with=federation.clients,
            lasts=self.lasts(place),
            measure_seconds=math.inf,
            record=True,
            budget=Budget(self._budget(place)),
            interrupted=place.interrupted,
            tell=lambda text: None,
            models=self.models,
            once=self.folder / ONCE,
        )

    def _budget(self, place: Place) -> int | None:
        asked = place.config["world"].get("transfer_budget")
        return Conditions(engine=ENGINE, transfer_budget=asked).bytes_each

    def lasts(self, place: Place) -> float:
        """Seconds of a round, as the run was told."""
        return float(place.config["world"]["deadline"])


class ToTheEnd(Events):
    """Events that end where the journal does, and begin with the run."""

    _first = True

    def next(self, wake: float, moment: float = LOOK) -> Event | None:
        if self.live:
            raise Interrupted
        event = super().next(wake, moment)
        if event is not None and self._first and event.seq != 1:
            raise RunFolderError(
                "the journal does not begin with the run: serve it with --record to replay it"
            )
        self._first = False
        return event


class Again(NetworkCarrier):
    """A carrier that ends where the journal does."""

    reads = ToTheEnd

    def once(self, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """As it was, and never made again."""
        return super().once(what, _nothing_more)

    def measure(self, measure: Measure) -> Measured:
        """As it was; nothing after the end."""
        try:
            return super().measure(measure)
        except Interrupted:
            return Measured([], {})


def _nothing_more() -> dict[str, Any]:
    """The journal ends before that was made."""
    raise Interrupted
