"""Results computed exactly once, even across restarts: random samples, noise, secure sums.

    make -> file, synced -> the journal's event "once", which names the file -> use

A restarted server applies its journal again. If the event exists, the tree comes from the file, and
nothing is computed; otherwise no result has been used, and the server computes it. Events before
the "once" event are set aside, as in the first process.

Checkpoints list the results for a model until that model exists: a server that was interrupted in
between requests the results again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from dure.deploy.journal import Event, Journal
from dure.deploy.server.draft import DRAFT, DraftFile
from dure.deploy.server.events import JournalEvents
from dure.deploy.tree_files import TreeFiles
from dure.errors import RunFolderError
from dure.protocol.carrier import STEP, AssignmentRecord
from dure.record.disk import retry_write
from dure.wire.requests import MessageBody, from_json, to_json

Tree = dict[str, Any]


class OnceEvent(MessageBody, frozen=True):
    """Body of the event "once".

    `number` and `digest` identify the file; `what` is the name of the result. `travelled` has
    (client, bytes down, bytes up) of the protocol's messages during the computation.
    """

    number: int
    what: str
    digest: str
    travelled: list[tuple[int, int, int]]


class DurableOnce:
    """Results computed once. `sweeps` is True to delete files that are no longer needed."""

    def __init__(
        self, events: JournalEvents, journal: Journal, trees: TreeFiles, sweeps: bool
    ) -> None:
        self._events = events
        self._journal = journal
        self._trees = trees
        self._sweeps = sweeps
        self.draft = DraftFile(trees.folder / DRAFT, lambda: self._number)
        """Draft of the result in progress."""
        self.making = False
        """Whether a result is being computed."""
        self.travelled: dict[int, tuple[int, int]] = {}
        """Bytes down and up, by client, during the computation."""
        self._number = 0
        """Number of the next event."""
        self._files = 0
        """Number of the next file; lower numbers are named, or about to be named."""
        self._of_this_model: list[OnceEvent] = []
        self._again: list[OnceEvent] = []
        """Results for the model in progress at a checkpoint, which will be requested again."""
        self._over: list[int] = []
        """Numbers of the files that the next checkpoint makes obsolete."""
        self._covered: list[int] = []

    def get(self, what: str, make: Callable[[], Tree]) -> tuple[Tree, OnceEvent]:
        """Return the result of `make`, computed now or before.

        Raises RunFolderError if the file of an earlier result is missing or damaged.
        """
        for made in self._again:
            if made.what == what:
                self._again.remove(made)
                # The transferred bytes are in the checkpoint already.
                return self._read(made), replace(made, travelled=[])
        while self._journal.behind:
            found = self._event()
            if found is not None:
                made = self._named(found, what)
                return self._read(made), made
        return self._make(what, make)

    def _make(self, what: str, make: Callable[[], Tree]) -> tuple[Tree, OnceEvent]:
        self.making = True
        self.travelled = {}
        try:
            tree = make()
        finally:
            self.making = False
        number = self._number
        self._files = number + 1
        digests: list[str] = []
        # A disk that is full for a moment must not lose a sum.
        retry_write(lambda: digests.append(self._trees.write(number, tree)))
        travelled = [(client, *both) for client, both in sorted(self.travelled.items())]
        self._journal.write("once", body=to_json(OnceEvent(number, what, digests[-1], travelled)))
        # The event is applied in order with the others, as after a restart.
        while True:
            found = self._event()
            if found is not None:
                self.draft.over()
                return tree, self._named(found, what)

    def _event(self) -> Event | None:
        """Return the next event if it is "once"; set other events aside."""
        event = self._events.next(math.inf)
        if event is None or event.kind == "once":
            return event
        self._events.aside.append(event)
        return None

    def _named(self, event: Event, what: str) -> OnceEvent:
        """Decode an event "once". Raises RunFolderError if it is about another result."""
        made = from_json(event.body, OnceEvent)
        if (made.what, made.number) != (what, self._number):
            raise RunFolderError(
                f"row {event.seq} of the journal contains {made.what!r} with the number "
                f"{made.number}, but the next event is {what!r} with the number {self._number}: "
                "restore the journal of this run"
            )
        self._number += 1
        self._of_this_model.append(made)
        return made

    def _read(self, made: OnceEvent) -> Tree:
        return self._trees.read(made.number, made.digest)

    def model_made(self) -> None:
        """Forget the results for a model that now exists."""
        self._over += [made.number for made in self._of_this_model]
        self._of_this_model = []
        self._again = []

    def sweep(self) -> None:
        """Delete files that no event names or that are not needed, such as remains of a kill."""
        self._trees.delete_from(max(self._files, self._number))
        if self._sweeps:
            needed = [made.number for made in self._of_this_model]
            # Includes a file whose event is still being written.
            needed += range(self._number, self._files)
            self._trees.keep_only([*needed, *self._over, *self._covered])

    # Checkpoints

    def saved(self) -> None:
        """Delete the files that the stored checkpoint makes obsolete."""
        if self._sweeps:
            self._trees.delete(self._covered)
        self._covered = []

    def state(self) -> Tree:
        self._covered = self._over
        self._over = []
        return {
            "number": self._number,
            "made": [msgspec.to_builtins(made) for made in self._of_this_model],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` has returned."""
        self._number = state["number"]
        self._of_this_model = [msgspec.convert(one, OnceEvent) for one in state["made"]]
        self._again = list(self._of_this_model)


def steps(made: OnceEvent, round: int, now: float) -> list[AssignmentRecord]:
    """Return the bytes transferred during the computation, for the report."""
    return [
        AssignmentRecord(client, round, now, now, STEP, down, up, 0.0, 0.0)
        for client, down, up in made.travelled
    ]
