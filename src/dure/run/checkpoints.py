"""When a run writes a checkpoint, what is in it, and how a run goes on from one.

Every rank comes here together: a model may lie on all of them, and ranks may hold things of their
own. Only rank 0 reads and writes the folder.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dure import __version__
from dure.collectives.group import Group
from dure.contracts.strategy import Learner
from dure.errors import DureError, RunFolderError, described
from dure.memory.shelf import Shelf
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.best import settle_best
from dure.record.checkpoint import (
    VERSION,
    check_version,
    pack_checkpoint,
)
from dure.record.meter import Counters, sum_of_counters
from dure.record.run import RunFolder
from dure.run.handing import gathered_trees, handed
from dure.run.job import Job, Position

CHECKPOINT_SECONDS = 10.0
"""Seconds between checkpoints, without `checkpoint_every`.

One is written at the first evaluation after so many; in an elastic job, which loses all that came
after its checkpoint whenever it loses a rank, at the first step.
"""

CHECKPOINT_SHARE = 0.05
"""Of the time that may go into such checkpoints; where writing one takes long, they are rarer."""


class Checkpoints:
    """One rank's part of writing and reading the checkpoints of a run. folder: rank 0's."""

    def __init__(self, job: Job, group: Group, learner: Learner, folder: RunFolder | None) -> None:
        self.job = job
        self.group = group
        self.learner = learner
        self.folder = folder
        self._written = time.monotonic()
        self._took = 0.0
        self.doubtful = False
        """Whether the run went on from a checkpoint without checksums: damage may show late."""

    def due(self, step: int, evaluates: bool) -> bool:
        """Whether one should be written after `step`.

        evaluates: whether the step ends with an evaluation.
        """
        if self.job.checkpoint_every is not None:
            return step % self.job.checkpoint_every == 0
        # The newest write tells what the next one will take.
        pause = max(CHECKPOINT_SECONDS, self._took / CHECKPOINT_SHARE)
        # Only rank 0 asks: ranks' clocks would not agree on it.
        late = time.monotonic() - self._written > pause
        return late and (self.job.elastic or evaluates)

    def write(self, position: Position, workers: list[Counters]) -> None:
        """All ranks come here after the same step. workers: everybody's counters."""
        started = time.perf_counter()
        self._save(position, workers)
        ended = time.perf_counter()
        self._written = time.monotonic()
        self._took = ended - started
        self.group.meter.mark("checkpoint", "checkpoint", started, ended, position.step)

    def keep_last_good(self, position: Position) -> None:
        """After a loss that was not finite: keeps the state before that step.

        Not if that is spoilt as well, or lies on other ranks too, which are ending by now.
        """
        if self.folder is None or position.step == 0:
            return
        if self.learner.parted and self.group.size > 1:
            return
        weights = self.learner.weights().values()
        if all(bool(one.isfinite().all()) for one in weights if one.is_floating_point()):
            # of this rank alone: the others are ending as well
            self._save(position, [meter.counters for meter in self.learner.meters()])

    def _save(self, position: Position, workers: list[Counters]) -> None:
        learner = self.learner.state()
        # Every rank sends its part, also those that do not write.
        if self.learner.parted:
            shelf = Shelf(self.job.folder)
            learner = {**learner, "parts": gathered_trees(self.group, self.learner.part(), shelf)}
        state = {
            "version": VERSION,
            "dure": __version__,
            "position": msgspec.to_builtins(position),
            "workers": [msgspec.to_builtins(counters) for counters in workers],
            "learner": learner,
            "generators": generators_state(),
            "ranks": self.group.size,
        }
        # On every rank: a model that is divided is put together here.
        weights = self.learner.weights()
        if self.folder is not None:
            # More than one may be written in the middle of a step, of ever more examples.
            past = position.samples if position.midway else 0
            self.folder.save_checkpoint(position.step, pack_checkpoint(weights, state), past)
            settle_best(self.folder.path)
            self.learner.saved()

    def read(self) -> Position | None:
        """Every rank takes over the newest checkpoint; returns its position, None if there is none.

        Rank 0 hands it to the others (`dure.run.handing`), so that only rank 0 needs the folder.
        Raises RunFolderError if a newer dure wrote it, or another number of ranks where each rank
        keeps its own part.
        """
        stored = self.folder.read_checkpoint() if self.folder is not None else None
        shelf = Shelf(self.job.folder)
        received = handed(self.group, stored, shelf, self.learner.by_parts)
        if received is None:
            return None
        weights, state = received.weights, received.state
        oldest = self.job.strategy.oldest_checkpoint
        check_version(state, f"the checkpoint of {self.job.folder}", oldest)
        self._check_ranks(state.get("ranks", self.group.size))
        try:
            position = msgspec.convert(state["position"], Position)
            self.learner.restore(weights, state["learner"])
            self._take_over(list(map(_counters, state["workers"])))
            # Rank 0's state, on every rank: what ranks draw in steps follows from the seed anyway.
            restore_generators(state["generators"])
        except DureError:
            raise
        except Exception as error:
            # It is whole, but of another shape: made by hand, say, or for another model.
            raise RunFolderError(
                f"the checkpoint of {self.job.folder} does not fit what is trained "
                f"({described(error)}): put back a copy of it, or remove it to train "
                f"from the start"
            ) from error
        unsealed = float(self.folder is not None and self.folder.unsealed)
        self.doubtful = bool(self.group.all_gather_values([unsealed], "reading a checkpoint")[0][0])
        return position

    def perhaps_damaged(self, error: BaseException) -> RunFolderError:
        """What is said of an error while the checkpoint is doubtful.

        It may come from there, or from code of the user's: nobody can tell.
        """
        return RunFolderError(
            f"{error}. The checkpoint of {self.job.folder} that this run went on from has no "
            f"checksums, so that it may be damaged: if the error is not your own code's, put back "
            f"a copy of it, or remove it to train from the start"
        )

    def check_folder(self) -> None:
        """Raises RunFolderError if a rank does not see the folder.

        Any rank may become rank 0 when the job starts again, and then has to go on from there.
        """
        path = self.job.folder
        sees_it = float(path is not None and path.is_dir())
        told = self.group.all_gather_values([sees_it])
        blind = [f"rank {rank}" for rank, (seen,) in enumerate(told) if not seen]
        if blind:
            raise RunFolderError(
                f"{', '.join(blind)} does not see the run folder {path}: an elastic job needs one "
                f"on a disk that all its machines share, for any of them may become rank 0"
            )

    def _check_ranks(self, before: int) -> None:
        """Raises RunFolderError if other ranks than these held the parts of the checkpoint."""
        now = self.group.size
        if before != now and self.learner.parted and not self.learner.resizes:
            raise RunFolderError(
                f"{self.job.folder} was written by {before} ranks, and {self.job.strategy.name} "
                f"cannot go on with {now}, for each rank keeps a state of its own: start {before} "
                f"again"
            )

    def _take_over(self, workers: list[Counters]) -> None:
        """The meters of this place go on from a checkpoint's.

        Ranks that are gone leave their counters to those that are there, so that sums over all
        workers go on; new ranks begin at zero.
        """
        meters = self.learner.meters()
        # Several ranks have one meter each; a single one has those of all its workers.
        first = self.group.rank if self.group.size > 1 else 0
        everybody = self.group.size if self.group.size > 1 else len(meters)
        for index, meter in enumerate(meters, start=first):
            # From 5 ranks to 2: rank 0 takes over 0, 2 and 4, rank 1 takes over 1 and 3.
            meter.counters = sum_of_counters(workers[index::everybody])


def _counters(written: Any) -> Counters:
    """A worker's counters; those of a checkpoint of the first version have no names."""
    if isinstance(written, list):
        return Counters.from_list(written)
    return msgspec.convert(written, Counters)
