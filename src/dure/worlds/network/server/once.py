"""What happens once, whatever happens to the server: coins, noise, sums that clients have made.

    make -> file, synced -> the journal's event "once", which names it -> it is used

A server that goes on after a kill goes through its journal again. Where the event is there, the
tree comes from the file, and nothing is made; where it is not, nobody has seen what was made, and
it is made anew. Events before it in the journal are put aside, as they were in the first life.

What was made for a model is remembered in checkpoints until that model is there: a server that was
interrupted in between asks for it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from dure.errors import RunFolderError
from dure.protocol.carrier import STEP, Flight
from dure.record.disk import patiently
from dure.wire.requests import Said, from_json, to_json
from dure.worlds.network.journal import Event, Journal
from dure.worlds.network.server.draft import DRAFT, DraftFile
from dure.worlds.network.server.events import Events
from dure.worlds.network.trees import Trees

Tree = dict[str, Any]


class Made(Said, frozen=True):
    """The body of the event. number, digest: of the file; what: is in it, in words.

    travelled: (client, bytes down, bytes up) of what was said and answered while it was made.
    """

    number: int
    what: str
    digest: str
    travelled: list[tuple[int, int, int]]


class Once:
    """What was made once. sweeps: whether files go that are not needed any more."""

    def __init__(self, events: Events, journal: Journal, trees: Trees, sweeps: bool) -> None:
        self._events = events
        self._journal = journal
        self._trees = trees
        self._sweeps = sweeps
        self.draft = DraftFile(trees.folder / DRAFT, lambda: self._number)
        """Of what is being made."""
        self.making = False
        """Whether something is being made just now."""
        self.travelled: dict[int, tuple[int, int]] = {}
        """Bytes down and up, by client, of what is being made."""
        self._number = 0
        """Of the next event: so many were there."""
        self._files = 0
        """Of the next file: those below were named, or are about to be."""
        self._of_this_model: list[Made] = []
        self._again: list[Made] = []
        """Of a model that a checkpoint was in the middle of: what will be asked for again."""
        self._over: list[int] = []
        """Numbers of files that a checkpoint makes useless."""
        self._covered: list[int] = []

    def get(self, what: str, make: Callable[[], Tree]) -> tuple[Tree, Made]:
        """The tree that `make` gives, or has given.

        Raises RunFolderError where the file of what was made before is missing or damaged.
        """
        for made in self._again:
            if made.what == what:
                self._again.remove(made)
                # What travelled is in the checkpoint too.
                return self._read(made), replace(made, travelled=[])
        while self._journal.behind:
            found = self._event()
            if found is not None:
                made = self._named(found, what)
                return self._read(made), made
        return self._make(what, make)

    def _make(self, what: str, make: Callable[[], Tree]) -> tuple[Tree, Made]:
        self.making = True
        self.travelled = {}
        try:
            tree = make()
        finally:
            self.making = False
        number = self._number
        self._files = number + 1
        digests: list[str] = []
        # A disk that is full for a moment costs nobody a sum.
        patiently(lambda: digests.append(self._trees.write(number, tree)))
        travelled = [(client, *both) for client, both in sorted(self.travelled.items())]
        self._journal.write("once", body=to_json(Made(number, what, digests[-1], travelled)))
        # It is applied in its place among the others, as after a restart.
        while True:
            found = self._event()
            if found is not None:
                self.draft.over()
                return tree, self._named(found, what)

    def _event(self) -> Event | None:
        """The next event, where it is of this kind; others are put aside."""
        event = self._events.next(math.inf)
        if event is None or event.kind == "once":
            return event
        self._events.aside.append(event)
        return None

    def _named(self, event: Event, what: str) -> Made:
        """What the event says was made. Raises RunFolderError where that is something else."""
        made = from_json(event.body, Made)
        if (made.what, made.number) != (what, self._number):
            raise RunFolderError(
                f"the journal says in row {event.seq} that {made.what!r} was made, as number "
                f"{made.number}, and {what!r} comes now, as number {self._number}: put back the "
                f"journal of this run"
            )
        self._number += 1
        self._of_this_model.append(made)
        return made

    def _read(self, made: Made) -> Tree:
        return self._trees.read(made.number, made.digest)

    def model_made(self) -> None:
        """The model is there: what was made for it is not asked for again."""
        self._over += [made.number for made in self._of_this_model]
        self._of_this_model = []
        self._again = []

    def sweep(self) -> None:
        """Removes what a kill has left: files that no event names, or that are not needed."""
        self._trees.delete_from(max(self._files, self._number))
        if self._sweeps:
            needed = [made.number for made in self._of_this_model]
            # Also that whose event is on its way, where clients may come only now.
            needed += range(self._number, self._files)
            self._trees.keep_only([*needed, *self._over, *self._covered])

    # Checkpoints

    def saved(self) -> None:
        """A checkpoint with the newest `state` is on the disk."""
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
        """The inverse of `state`."""
        self._number = state["number"]
        self._of_this_model = [msgspec.convert(one, Made) for one in state["made"]]
        self._again = list(self._of_this_model)


def steps(made: Made, round: int, now: float) -> list[Flight]:
    """What travelled while it was made, for the report."""
    return [
        Flight(client, round, now, now, STEP, down, up, 0.0, 0.0)
        for client, down, up in made.travelled
    ]
