"""Learners: a strategy at work on a rank, advancing a step or a round at a time.

`dure.train` drives every learner with the same loop, which is why every system is measured,
stopped, checkpointed and resumed on the same terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from dure.collectives.group import Group
from dure.record.meter import Meter

STOP = 1
CHECKPOINT = 2
INTERRUPT = 4
TRANSFER_BUDGET_SPENT = 8
CALLBACK = 16
"""Control flags of rank 0, as bits in a step's message.

STOP: end the run. CHECKPOINT: write a checkpoint. INTERRUPT, with STOP: the user or the launcher
asked for the end. SPENT, with STOP: clients have used up their transfer budget; set by a server.
CALLBACK, with STOP: a callback asked for the end. All ranks receive the flags in the same step, and
act alike after the step.
"""


class StepInterrupted(Exception):  # noqa: N818
    """Raised by `advance` if the user ends the run in the middle of a resumable step.

    The learner's state is complete, in the middle of a step.
    """


class StepResult(NamedTuple):
    """Result of a step or round, the same on every rank."""

    loss: float | None
    """Mean training loss over the joint batch, or the round's examples; None without examples."""
    samples: int
    """Training examples processed by all workers together."""
    control_flags: int = 0
    """Control flags of rank 0 for this step."""
    numbers: Mapping[str, float] | None = None
    """Further numbers about the step, by name, for the history: such as residuals."""
    whole: bool = True
    """Whether the step is complete.

    If not, the run ends in the middle of the step, with a complete `state`; the other fields then
    cover the part of the step that is done, and the next `advance`, of a resumed run, does the
    rest.
    """


class Proof(NamedTuple):
    """Check that passed before training began."""

    what: str
    """Description for the user, such as "the traced program gives what the model gives"."""
    seconds: float
    """Duration of the check in seconds."""


class Learner(ABC):
    """Strategy at work on a rank."""

    group: Group
    """The ranks, with this rank's number."""

    where: str
    """Name of this process, for errors: "rank 1" or "server"."""

    units_per_epoch: int
    """Steps or rounds in a pass over the training data: the default interval of evaluations.

    Computed from the present length of rounds, which a strategy may change in the course of a run.
    """

    rank_state_differs: bool = False
    """Whether ranks have different state, such as separate optimizers: see `part`."""

    proofs: Sequence[Proof] = ()
    """Checks passed at construction (`RankContext.check`), the same on every rank."""

    examples: int | None = None
    """Training examples of an epoch over all workers; None: the task's number."""

    elsewhere: Sequence[str] = ()
    """Names of the model's tensors that only other processes hold; `weights` lacks them."""

    resizes: bool = False
    """Whether `restore` also accepts the parts of another number of ranks."""

    averaged_tensors_are_parts: bool = False
    """Whether `averaged_tensors` has parts of tensors, or several tensors in a single buffer."""

    def averaged_tensors(self) -> Mapping[str, Tensor]:
        """Return the trained tensors of this rank, of which `Task.ema` takes an average.

        The names are the names of `weights`, unless `averaged_tensors_are_parts`. Only called if
        the strategy supports ema.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method averaged_tensors")

    def changing_averaged_tensors(self) -> AbstractContextManager[object]:
        """Context manager around a change of the `averaged_tensors`, entered on all ranks."""
        return nullcontext()

    @abstractmethod
    def flops_per_step(self) -> float:
        """Return the floating-point operations of an optimizer step in this process.

        Small steps get a single thread (`dure.machine.threads`).
        """

    @abstractmethod
    def advance(self, control_flags: int) -> StepResult:
        """Do a step or round. Rank 0 passes its control flags; other ranks pass 0."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return the metrics named by `Strategy.measures` for the current model.

        Empty without test data. The values are the same on every rank, because limits depend on
        them.
        """

    by_parts: bool = False
    """Whether `restore` accepts tensors in files (`dure.record.disk_tensors`).

    It then reads this rank's part; otherwise all tensors are passed in memory.
    """

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Return the whole model's state_dict, on rank 0. The tensors may be in files."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all state besides the weights: optimizer state, position, and "buffers".

        "buffers" are the buffers that a state_dict leaves out (`non_persistent_buffers`). Tensors
        may be in files (`dure.record.disk_tensors`).
        """

    @abstractmethod
    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from `weights` and `state`. state["parts"] has the parts of all ranks."""

    def meters(self) -> Sequence[Meter]:
        """Return the meters of the workers here: this rank's, or the server's and its clients'."""
        return [self.group.meter]

    def part(self) -> Any:
        """Return the state that only this rank has, as a tree for checkpoints.

        Called if `rank_state_differs`.
        """
        return None

    def exhausted(self) -> str | None:
        """Return the name of a resource that is used up, such as "epsilon", or None.

        No further step is possible then. The value is the same on every rank. `summary.json`
        records the value as the reason of the end; a resumed run calls this method before its first
        step.
        """
        return None

    def ended(self, reason: str) -> None:
        """Handle the end of the run by this limit; "interrupt" if the run may continue."""
        return

    def rest(self) -> None:
        """Release everything that only `advance` and `state` need.

        `weights` and `non_persistent_buffers` are called once more. Called on all ranks.
        """
        return

    def non_persistent_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that a state_dict leaves out. Called on all ranks."""
        buffers: Mapping[str, Tensor] = self.state()["buffers"]
        return buffers

    def saved(self) -> None:
        """Handle that the newest `state` is on the disk: older backup data can be deleted."""
        return

    def numbers(self) -> Mapping[str, float]:
        """Return numbers about all steps so far, by name, such as an epsilon.

        Called at evaluations.
        """
        return {}

    def facts(self) -> dict[str, Any] | None:
        """Return the location of the model's parts as JSON, for the report, or None.

        The call does not communicate. summary.json has all ranks' facts, in order.
        """
        return None
