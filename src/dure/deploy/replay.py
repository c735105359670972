"""Replay of a recorded run from its journal.

The replay serves no clients and writes nothing to the run's folder. It applies the events of the
journal and the recorded updates; the server therefore makes the same models, bit for bit.
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

from dure.contracts.learner import StepInterrupted
from dure.contracts.world import RankContext
from dure.deploy.clock import FederationClock
from dure.deploy.journal import Event, Journal, backup
from dure.deploy.server.blob_cache import BlobCache
from dure.deploy.server.carrier import (
    COHORT,
    ONCE,
    FederationStores,
    NetworkCarrier,
    ServingSettings,
)
from dure.deploy.server.events import LOOK, JournalEvents
from dure.deploy.server.model_digests import FILE, ModelDigests
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.updates import Updates
from dure.deploy.world import ENGINE, machine, run_server
from dure.errors import RunFolderError
from dure.fleet.budget import TransferBudget
from dure.fleet.conditions import ClientWorld, Conditions
from dure.protocol.carrier import Carrier
from dure.protocol.messages import EvaluationRequest, EvaluationResults
from dure.protocol.server_context import ServerContext
from dure.wire.layout import FederationSpec

Value = TypeVar("Value")


@dataclass(frozen=True)
class Replay(ClientWorld):
    """World of the recorded clients of a run, with the journal in `folder`."""

    folder: Path
    run_id: str

    name: ClassVar[str] = "replay"

    @property
    def serves(self) -> bool:
        return True

    @property
    def conditions(self) -> Conditions:
        return Conditions(engine=ENGINE)

    @cached_property
    def models(self) -> ModelDigests:
        """Recorded digests of the run's models, with which the replayed models are compared."""
        return ModelDigests(self.folder / FILE, writes=False)

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        return run_server(program, report, self.conditions, self._carrier)

    def _carrier(self, federation: FederationSpec, context: ServerContext) -> Carrier:
        copy = Path(context.ending.enter_context(tempfile.TemporaryDirectory(prefix="dure-")))
        backup(self.folder, copy / "journal.db")
        if (self.folder / COHORT).exists():
            shutil.copy(self.folder / COHORT, copy / COHORT)
        clock = FederationClock()
        journal = Journal(copy, clock, self.run_id)
        context.ending.callback(journal.close)
        return ReplayCarrier(
            federation=federation,
            stores=FederationStores(
                folder=copy,
                journal=journal,
                clock=clock,
                updates=Updates(self.folder / "updates"),
                outbox=ClientOutbox(clock.now),
                cache=BlobCache(),
                models=self.models,
                once=self.folder / ONCE,
            ),
            settings=ServingSettings(
                start_with=federation.clients,
                answer_timeout=self.answer_timeout(context),
                measure_seconds=math.inf,
                record=True,
            ),
            machine=machine(federation.threads),
            budget=TransferBudget(self._budget(context)),
            interrupted=context.interrupted,
            tell=lambda text: None,
        )

    def _budget(self, context: RankContext) -> int | None:
        asked = context.config["world"].get("transfer_budget")
        return Conditions(engine=ENGINE, transfer_budget=asked).bytes_each

    def answer_timeout(self, context: RankContext) -> float:
        """Return the timeout of a round in seconds, from the run's config."""
        return float(context.config["world"]["deadline"])


class ReplayEvents(JournalEvents):
    """Events of a complete journal: raises Interrupted at its end.

    Raises RunFolderError if the journal does not begin with the run.
    """

    _first = True

    def next(self, wake: float, moment: float = LOOK) -> Event | None:
        if self.live:
            raise StepInterrupted
        event = super().next(wake, moment)
        if event is not None and self._first and event.seq != 1:
            raise RunFolderError(
                "the journal does not contain the start of the run: serve with --record to be "
                "able to replay a run"
            )
        self._first = False
        return event


class ReplayCarrier(NetworkCarrier):
    """Carrier that ends at the end of the journal."""

    reads = ReplayEvents

    def once(self, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the recorded result; never compute it."""
        return super().once(what, _nothing_more)

    def measure(self, measure: EvaluationRequest) -> EvaluationResults:
        """Return the recorded measurement; an empty measurement at the end of the journal."""
        try:
            return super().measure(measure)
        except StepInterrupted:
            return EvaluationResults([], {})


def _nothing_more() -> dict[str, Any]:
    """Raise Interrupted, because the journal ends before this result."""
    raise StepInterrupted
