"""Strategies: the division of the learning between workers.

A strategy is a frozen dataclass whose fields are its paper's hyperparameters. It makes a *learner*:
the strategy at work on a rank (`dure.contracts.learner`). Its static traits are a record, `traits`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from dure.arguments import CheckedSettings
from dure.contracts.learner import Learner, Proof
from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.contracts.training_options import Part
from dure.contracts.world import Kind, RankContext, World
from dure.data.partition import PartitionDescription
from dure.data.sampling import SamplingRequest
from dure.memory.formula import MemoryShares

if TYPE_CHECKING:
    from typing_extensions import Self

OWN_LOSS: Literal["own_loss"] = "own_loss"
"""Feature of a task whose model has its own loss (`dure.OwnLoss`)."""

Feature = Part | Literal["own_loss"]
"""Feature of a task that a strategy may not support."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Static traits of a strategy, the same for all values of its fields.

    Args:
        kind: kind of the worlds for which the strategy is designed.
        unit: unit of progress: "step" or "round".
        additional_worlds: additional kinds of worlds that the strategy supports, with its label
            there.
        trains_with: supported options of `dure.contracts.training_options`; other options are
            refused by name.
        samples: supported samplings of the data owner's batches (`dure.data.sampling`). They apply
            in a world of ranks or of threads, and in a world of clients if that is the strategy's
            own kind.
        without: conditions of clients that the strategy does not support and refuses.
        moves: fields that only place the work: a resumed run may have other values of them.
        can_offload: valid values of the field `offload`; empty if the strategy has no such field.
        own_data: whether the ranks may have per-rank training data (`dure.data.rank_examples`).
        alone: whether the strategy uses a single worker, whatever the machine has.
        coordinated: whether only rank 0 of a world of ranks has a learner; the others run
            `run_assistant`.
        trains_parts: whether the strategy trains a head and a tail of two tasks, each by its own
            optimizer.
        trains_at_server: whether the server of networked clients trains a part of the model itself.
        follows_model: whether simulated clients compute on the device of the task's model, on a GPU
            too.
        mean_of: name of the models whose mean is measured, if no participant trains or has that
            mean model. Tables show the name, and mark the mean as the best of no metric.
        oldest_checkpoint: oldest readable version of checkpoints, as
            `dure.record.checkpoint.VERSION`.
    """

    kind: Kind
    unit: str
    additional_worlds: Mapping[Kind, str] = field(default_factory=dict)
    trains_with: frozenset[Part] = frozenset()
    samples: frozenset[SamplingRequest] = frozenset()
    without: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    can_offload: tuple[str, ...] = ()
    own_data: bool = False
    alone: bool = False
    coordinated: bool = False
    trains_parts: bool = False
    trains_at_server: bool = False
    follows_model: bool = False
    mean_of: str = ""
    oldest_checkpoint: int = 1

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Supported kinds of worlds; the strategy's own kind is the first."""
        return self.kind, *self.additional_worlds


@dataclass(frozen=True, kw_only=True)
class RunTraits:
    """Traits of a run that follow from the fields of its strategy.

    Args:
        ranks: number of ranks that the fields require; None if any number is valid.
        deterministic: whether runs are reproducible bit for bit.
        protects: whether the strategy hides the examples from other parties: no example is then
            shown.
        uses_poisson_sampling: whether example-level differential privacy draws batches by Poisson
            sampling.
        spares_memory: whether freed memory is returned at once rather than reused in the next step.
        offloaded: names of the state that is in files while it is not needed, as in
            `Traits.can_offload`.
        computes_on: names of the devices in the fields, as `World.computes_on`; empty without such
            fields.
        imports: modules that the ranks need and that take seconds to import. The ranks import them
            at their start.
    """

    ranks: int | None = None
    deterministic: bool = True
    protects: bool = False
    uses_poisson_sampling: bool = False
    spares_memory: bool = False
    offloaded: Collection[str] = ()
    computes_on: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


class Strategy(CheckedSettings):
    """Division of the learning between workers: a frozen dataclass, made by the user.

    The fields are the hyperparameters: they are written into run folders, and are flags of the
    command line. A subclass defines `name`, `traits` and `learner`; other members have defaults.
    """

    name: ClassVar[str]

    traits: ClassVar[Traits]

    batch_size: int | None = None
    """Examples of a step, as a DataLoader defines them; None: all examples, or no batches."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse members that would have no effect: traits beside the record `traits`."""
        super().__init_subclass__(**options)
        hints = vars(cls).get("__annotations__", {})
        for record, name in ((Traits, "traits"), (RunTraits, "run_traits")):
            for member in vars(cls).keys() & {one.name for one in fields(record)}:
                # A setting may have such a name; a class variable would have no effect.
                if "ClassVar" in str(hints.get(member, "ClassVar")):
                    raise TypeError(f"{cls.__name__} defines {member}: give it in {name}")

    @property
    def label(self) -> str:
        """Label for tables: the name, and the fields that matter."""
        return self.name

    @property
    def run_traits(self) -> RunTraits:
        """Traits of a run with these fields."""
        # As many ranks as the default world starts.
        return RunTraits(ranks=1 if self.traits.alone else None)

    def label_in(self, kind: Kind) -> str:
        """Return the label for tables in a world of `kind`."""
        return self.traits.additional_worlds.get(kind, self.label)

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        """Return the reason why a feature is unsupported in a world of `kind`, or None.

        feature: a training option, or "own_loss". Called only for features that the task uses.
        """
        if feature == "own_loss" or feature in self.traits.trains_with:
            return None
        return "this system does not implement it"

    def holds_parts(self, workers: int | None) -> bool:
        """Return whether each worker has, and needs memory for, only a part of the model.

        The undivided model is then created in files (`dure.memory.file_backed_init`).
        """
        return False

    def shares(self, workers: int | None) -> MemoryShares | None:
        """Return the minimum memory share of the model for each worker during training.

        None if unknown: then no run is refused for lack of memory.
        """
        return None

    def planned(self, task: Task, stop: Stop) -> Self:
        """Return the strategy with the fields that depend on the run's length.

        An example is the noise for an epsilon. Called before `check`, so that run folders and
        labels have the derived values; a resumed run has them already. Raises ValueError if `stop`
        does not determine the length.
        """
        return self

    def batches_of_step(self, task: Task, workers: int | None) -> Fraction | None:
        """Return the number of batches of `batch_size` examples in an optimizer step.

        1 if a step takes a batch, joint or of one worker; 1/N if N workers divide the batch and
        each makes a step of its own; K if a step takes the batches of K clients together. None if
        every step takes all the data.
        """
        return Fraction(1)

    def check(self, task: Task, world: World) -> None:
        """Raise ValueError, before any work, if the fields do not fit.

        The fields may not fit each other, the task, the number of workers or the world.
        """

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Raise ValueError if the strategy cannot train the task's model in this world.

        The model stays unchanged, because it is the model that will be trained.
        """

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Run `check_model`, and then compare the strategy's assumptions with the model itself.

        An assumption is, for example, that a trace computes the model's function. None if there are
        no assumptions. Assumptions that only the ranks together can test are tested by their
        learners. The model stays unchanged. Raises ValueError, with the place of the difference.
        """
        self.check_model(task, model, world)
        return None

    def measures(self, task: Task, model: nn.Module, world: World) -> list[str]:
        """Return the names of the metrics of the learner's `evaluate`.

        A run may have targets for these metrics. Empty without evaluation.
        """
        sets = {"test": task.test, "validation": task.validation}
        return [
            f"{which}_{name}"
            for which, examples in sets.items()
            if examples is not None
            for name in ("loss", *task.measures)
        ]

    def division(self, task: Task, seed: int) -> PartitionDescription | None:
        """Return the division of the training data between owners, for the report, or None."""
        return None

    def parts(self, task: Task, seed: int, workers: int | None) -> Sequence[Tensor]:
        """Return the examples of each worker with a separate part of the data, as indices.

        Empty if the workers share the data.
        """
        return ()

    def run_assistant(self, task: Task, context: RankContext, seed: int) -> str:
        """Run a rank other than the first until the run ends, for a strategy with `coordinated`.

        Returns the limit that ended the run.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method assist")

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        """Return the learner: the model made under `seed`, ready for its first step."""
        raise NotImplementedError(f"{type(self).__name__} has no method learner")
