"""Write checkpoints of a run, and resume from them.

Writing and reading are collective: every rank may store parts of the model and state of its own.
Only rank 0 reads and writes the folder.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dure import __version__
from dure.collectives.group import Group
from dure.contracts.learner import Learner
from dure.errors import DureError, RunFolderError, described
from dure.machine.devices import to_cpu
from dure.memory.spill_store import SpillStore
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.best import drop_previous_best
from dure.record.checkpoint import (
    VERSION,
    check_version,
    pack_checkpoint,
)
from dure.record.meter import Counters, sum_of_counters
from dure.record.run import RunFolder
from dure.run.checkpoint_transfer import broadcast_checkpoint, gathered_trees
from dure.run.job import Job, Position

CHECKPOINT_SECONDS = 10.0
"""Seconds between checkpoints, without `checkpoint_every`.

A checkpoint is written at the first evaluation after this time; in an elastic job, which loses all
progress since its checkpoint when a rank fails, at the first step.
"""

CHECKPOINT_SHARE = 0.05
"""Largest share of the time for such checkpoints; slow writes make checkpoints rarer."""


class Checkpoints:
    """A rank's part of writing and reading checkpoints. folder: rank 0's run folder, else None."""

    def __init__(self, job: Job, group: Group, learner: Learner, folder: RunFolder | None) -> None:
        self.job = job
        self.group = group
        self.learner = learner
        self.folder = folder
        self._written = time.monotonic()
        self._took = 0.0
        self.doubtful = False
        """Whether the run resumed from a checkpoint without checksums: damage may show late."""

    def due(self, step: int, evaluates: bool) -> bool:
        """Return whether a checkpoint is due after `step`.

        evaluates: whether the step ends with an evaluation.
        """
        if self.job.checkpoint_every is not None:
            return step % self.job.checkpoint_every == 0
        # The duration of the last write predicts that of the next.
        pause = max(CHECKPOINT_SECONDS, self._took / CHECKPOINT_SHARE)
        # Only rank 0 calls this: the clocks of ranks would disagree.
        late = time.monotonic() - self._written > pause
        return late and (self.job.elastic or evaluates)

    def write(self, position: Position, workers: list[Counters]) -> None:
        """Write a checkpoint; collective after the same step. workers: counters of all workers."""
        started = time.perf_counter()
        self._save(position, workers)
        ended = time.perf_counter()
        self._written = time.monotonic()
        self._took = ended - started
        self.group.meter.mark("checkpoint", "checkpoint", started, ended, position.step)

    def keep_last_good(self, position: Position) -> None:
        """Write the state before a step whose loss was not finite.

        Skipped if the weights are not finite either, or if other ranks store parts of them, since
        those ranks are ending too.
        """
        if self.folder is None or position.step == 0:
            return
        if self.learner.rank_state_differs and self.group.size > 1:
            return
        weights = self.learner.weights().values()
        if all(bool(one.isfinite().all()) for one in weights if one.is_floating_point()):
            # Counters of this rank alone: the other ranks are ending too.
            self._save(position, [meter.counters for meter in self.learner.meters()])

    def _save(self, position: Position, workers: list[Counters]) -> None:
        # In the CPU's memory, so that a run can go on on another device.
        learner = to_cpu(self.learner.state())
        # Collective: every rank sends its part, including ranks that do not write.
        if self.learner.rank_state_differs:
            shelf = SpillStore(self.job.folder)
            learner = {
                **learner,
                "parts": gathered_trees(self.group, to_cpu(self.learner.part()), shelf),
            }
        state = {
            "version": VERSION,
            "dure": __version__,
            "position": msgspec.to_builtins(position),
            "workers": [counters.written() for counters in workers],
            "learner": learner,
            "generators": generators_state(),
            "ranks": self.group.size,
        }
        # Collective: a divided model is gathered here.
        weights = to_cpu(self.learner.weights())
        if self.folder is not None:
            # Several checkpoints may be written within a step, each after more examples.
            past = position.samples if position.midway else 0
            self.folder.save_checkpoint(position.step, pack_checkpoint(weights, state), past)
            drop_previous_best(self.folder.path)
            self.learner.saved()

    def read(self) -> Position | None:
        """Load the newest checkpoint on every rank; return its position, None without a checkpoint.

        Rank 0 sends the checkpoint to the others (`dure.run.checkpoint_transfer`), so that only
        rank 0 needs the folder.

        Raises RunFolderError if a newer dure wrote the checkpoint, or if each rank stores its own
        part and the number of ranks has changed.
        """
        stored = self.folder.read_checkpoint() if self.folder is not None else None
        shelf = SpillStore(self.job.folder)
        received = broadcast_checkpoint(self.group, stored, shelf, self.learner.by_parts)
        if received is None:
            return None
        weights, state = received.weights, received.state
        oldest = self.job.strategy.traits.oldest_checkpoint
        check_version(state, f"the checkpoint of {self.job.folder}", oldest)
        self._check_ranks(state.get("ranks", self.group.size))
        try:
            position = msgspec.convert(state["position"], Position)
            self.learner.restore(weights, state["learner"])
            self._take_over(list(map(_counters, state["workers"])))
            # Rank 0's generators, on every rank: draws within steps follow from the seed anyway.
            restore_generators(state["generators"])
        except DureError:
            raise
        except Exception as error:
            # Undamaged but of another shape: made by hand, for example, or for another model.
            raise RunFolderError(
                f"the checkpoint of {self.job.folder} does not match the training "
                f"({described(error)}): restore it from a copy, or remove it to train from the "
                "start"
            ) from error
        unsealed = float(self.folder is not None and self.folder.unsealed)
        self.doubtful = bool(self.group.all_gather_values([unsealed], "reading a checkpoint")[0][0])
        return position

    def perhaps_damaged(self, error: BaseException) -> RunFolderError:
        """Return the error for a failure after resuming from a checkpoint without checksums.

        The cause may be the checkpoint or the user's code, and cannot be determined.
        """
        return RunFolderError(
            f"{error}. The checkpoint of {self.job.folder} from which this run was resumed has no "
            "checksums, so it may be damaged: if the error does not come from your own code, "
            "restore the checkpoint from a copy, or remove it to train from the start"
        )

    def check_folder(self) -> None:
        """Raise RunFolderError if any rank does not see the folder. Collective.

        Any rank may become rank 0 when an elastic job restarts, and then resumes from the folder.
        """
        path = self.job.folder
        sees_it = float(path is not None and path.is_dir())
        told = self.group.all_gather_values([sees_it])
        blind = [f"rank {rank}" for rank, (seen,) in enumerate(told) if not seen]
        if blind:
            raise RunFolderError(
                f"{', '.join(blind)} cannot read the run folder {path}: an elastic job needs a "
                "run folder on a disk that all its machines share, because any of them may "
                "become rank 0"
            )

    def _check_ranks(self, before: int) -> None:
        """Raise RunFolderError if the number of ranks changed and parts cannot be redistributed."""
        now = self.group.size
        if before != now and self.learner.rank_state_differs and not self.learner.resizes:
            raise RunFolderError(
                f"{self.job.folder} was written by {before} ranks, and {self.job.strategy.name} "
                f"cannot be resumed with {now}, because each rank has its own state: start "
                f"{before} ranks"
            )

    def _take_over(self, workers: list[Counters]) -> None:
        """Continue this rank's meters from the counters of a checkpoint.

        The remaining ranks take over the counters of ranks that left, so that sums over all workers
        continue; new ranks start at zero.
        """
        meters = self.learner.meters()
        # With several ranks each has a single meter; a single rank has a meter for each worker.
        first = self.group.rank if self.group.size > 1 else 0
        everybody = self.group.size if self.group.size > 1 else len(meters)
        for index, meter in enumerate(meters, start=first):
            # From 5 ranks to 2: rank 0 takes over 0, 2 and 4, rank 1 takes over 1 and 3.
            meter.counters = sum_of_counters(workers[index::everybody])


def _counters(written: Any) -> Counters:
    """Decode a worker's counters; in the first version of checkpoints they have no names."""
    if isinstance(written, list):
        return Counters.from_list(written)
    return msgspec.convert(written, Counters)
