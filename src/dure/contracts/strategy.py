"""Strategies, learners and worlds, and the context in which a program runs.

A strategy is a frozen dataclass whose fields are its paper's hyperparameters. It makes a *learner*:
the strategy at work on a rank, advancing a step or a round at a time. `dure.train` drives every
learner with the same loop, which is why every system is measured, stopped, checkpointed and resumed
on the same terms.

A `RankContext` is the context that a world passes to the program running in it. Worlds know no
system and systems know no world; they meet in `dure.train`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dure.arguments import CheckedSettings
from dure.collectives.group import Group
from dure.contracts.channels import Channels, HostedRun
from dure.contracts.initial_weights import holds_adapters, load_initial_weights
from dure.contracts.page import Page
from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.contracts.training_options import Part
from dure.data.examples import Examples
from dure.data.partition import PartitionDescription
from dure.data.sampling import SamplingRequest
from dure.data.validation_split import EvaluationExamples
from dure.fleet.conditions import Conditions
from dure.machine.devices import device_of_model, in_use, is_cpu
from dure.memory.file_backed_init import in_files_like
from dure.memory.formula import MemoryShares
from dure.protocol.carrier import Carrier, Clients
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.tensors.compiled import compile_in_place, unwrap_compiled
from dure.tensors.copies import copy_of
from dure.tensors.writable import make_writable
from dure.wire.layout import FederationSpec

if TYPE_CHECKING:
    from typing_extensions import Self

Kind = Literal["ranks", "threads", "clients"]
"""Three families of worlds.

SPMD ranks over a group; a program with worker threads, on one device or several; a server with
clients.
"""

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


class SigningKey(Protocol):
    """Private key. public: the public key as text."""

    public: str

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""


class Proof(NamedTuple):
    """Check that passed before training began."""

    what: str
    """Description for the user, such as "the traced program gives what the model gives"."""
    seconds: float
    """Duration of the check in seconds."""


class Learner(ABC):
    """Strategy at work on a rank."""

    unit: str = "step"
    """Unit of progress: "step" or "round"."""

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

    @abstractmethod
    def meters(self) -> Sequence[Meter]:
        """Return the meters of the workers here: this rank's, or the server's and its clients'."""

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


Value = TypeVar("Value")

MakesPage = Callable[[str, str, bool, Callable[[], Mapping[str, Any]]], Page]


@dataclass
class RankContext:
    """Context that a world passes to a program running in it.

    group: the ranks, with this rank's number.
    trace: this process's timeline.
    report: sends an event to the process that displays the run (rank 0 only).
    interrupted: whether the user asked to stop (rank 0 only).
    control_flags: returns the control flags in the middle of a long step: STOP, with INTERRUPT or
    without, or
        0. The driver sets it if it drives this rank alone.
    clock_offset: seconds to add to this machine's clock to get rank 0's clock.
    kind: kind of the world.
    devices: device of each worker of this program; the first is the program's own.
    ending: resources to close at the end of the run, such as threads.
    conditions: conditions of the clients of a federation.
    carrier: makes the carrier of messages between a coordinator and its clients, from the clients'
        side and the seed.
    prepared: returns the model that was made while the run was prepared.
    check: whether a learner compares its assumptions about the model with the model itself at
        construction; a difference raises ValueError.
    network: makes the carrier to remote clients, from the federation.
    channels: opens the channels to remote clients that stay connected, from the facts of the run.
    folder: folder of the run, if this process writes it. config: the content of config.json.
    report_seconds: minimum seconds between two reports of steps. signs: key that signs the final
        model; None for no signature.
    identities: the clients' public keys, by number, signed by the owner of the federation; None
        without such a roster.
    outlives: declares that the program survives the death of ranks other than the first, so that
    the
        world does not end the program.
    deadline: timeout in seconds for a silent rank.
    page: makes the live page of the run, for a listener of the world: from the token that opens the
        page, a description of the token's location, whether the page is served over TLS, and the
        server's facts about itself. It raises ImportError if plotting is not installed.
    """

    group: Group
    trace: Trace = field(default_factory=Trace)
    report: Callable[[dict[str, Any]], None] = lambda event: None
    interrupted: Callable[[], bool] = lambda: False
    control_flags: Callable[[], int] = lambda: 0
    clock_offset: float = 0.0
    kind: Kind = "ranks"
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    ending: ExitStack = field(default_factory=ExitStack)
    conditions: Conditions | None = None
    carrier: Callable[[Clients, int], Carrier] | None = None
    prepared: Callable[[], nn.Module] | None = None
    check: bool = True
    network: Callable[[FederationSpec], Carrier] | None = None
    channels: Callable[[HostedRun], Channels] | None = None
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    report_seconds: float = 0.1
    signs: SigningKey | None = None
    identities: Mapping[int, str] | None = None
    survives_peer_loss: Callable[[], None] = lambda: None
    deadline: float = 60.0
    page: MakesPage | None = None

    def model(self, task: Task, seed: int) -> nn.Module:
        """Return the run's newly created model: the prepared model of this process, or a new model.

        A learner calls this method once and copies the model for other uses (`unused_copy`).
        """
        model = self.host_model(task, seed)
        if self.kind == "clients":
            known = self.conditions
            # By default clients compute where the task makes the model.
            moves = known is not None and known.device is not None
        else:
            moves = self.kind == "ranks" and not is_cpu(self.device)
        # The weights are drawn where the task draws them, and are therefore the same on any device.
        return model.to(self.device) if moves else model

    def host_model(self, task: Task, seed: int) -> nn.Module:
        """Return the run's newly created model where the task creates it, usually on the CPU."""
        return seeded_model(task, seed) if self.prepared is None else self.prepared()

    @property
    def device(self) -> torch.device:
        """Device on which this program computes, or its first worker."""
        return self.devices[0]


class World(CheckedSettings):
    """Participants of a run and their connections: a frozen dataclass, made by the user.

    The fields are settings of the environment: they are written into run folders, and are flags of
    the command line. A subclass defines `name`, `kind` and `run`; other members have defaults.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the run folder and communicates with the user."""
        return True

    @property
    def rank_here(self) -> int:
        """Rank of this process if the process was started as a rank, otherwise 0."""
        return 0

    @property
    def workers(self) -> int | None:
        """Number of ranks or threads; None if the strategy determines the number of clients."""
        return None

    @property
    def conditions(self) -> Conditions | None:
        """Conditions of the clients, in a world of clients."""
        return None

    @property
    def computes_on(self) -> tuple[str, ...]:
        """Names of the workers' devices, if the world determines them."""
        return ()

    @property
    def starts_again(self) -> bool:
        """Whether ranks may be ended and restarted at any time, in another number."""
        return False

    @property
    def serves(self) -> bool:
        """Whether other processes have the training data, and this process is only their server."""
        return False

    @property
    def elsewhere(self) -> bool:
        """Whether programs run in other processes, for which this process only waits."""
        return False

    def begin(self, imports: Sequence[str] = ()) -> None:
        """Start slow preparations for the ranks in the background.

        imports: modules that the ranks will need (`Strategy.imports`).
        """

    def ready(self) -> None:
        """Wait for all preparations, so that no run's time includes them."""

    def describe(self) -> str:
        """Return a description for tables: "2 processes"."""
        return self.name

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        """Run `program` on every rank and return the result of rank 0.

        If each rank called `run` itself, the result is this rank's. `report` receives the program's
        events. Raises the first failure, after all ranks have ended.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method run")


class Strategy(CheckedSettings):
    """Division of the learning between workers: a frozen dataclass, made by the user.

    The fields are the hyperparameters: they are written into run folders, and are flags of the
    command line. A subclass defines `name`, `kind`, `unit` and `learner`; other members have
    defaults.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    """Kind of the worlds for which the strategy is designed."""

    batch_size: int | None = None
    """Examples of a step, as a DataLoader defines them; None: all examples, or no batches."""

    unit: ClassVar[str]
    """Unit that the learner counts: "step" or "round"."""

    additional_worlds: ClassVar[Mapping[Kind, str]] = {}
    """Additional kinds of worlds that the strategy supports, with its label there."""

    oldest_checkpoint: ClassVar[int] = 1
    """Oldest readable version of checkpoints (`dure.record.checkpoint.VERSION`)."""

    moves: ClassVar[frozenset[str]] = frozenset()
    """Fields that only place the work: a resumed run may have other values of them."""

    coordinated: ClassVar[bool] = False
    """Whether only rank 0 of a world of ranks has a learner; the others run `run_assistant`."""

    alone: ClassVar[bool] = False
    """Whether the strategy uses a single worker, whatever the machine has."""

    trains_parts: ClassVar[bool] = False
    """Whether the strategy trains a head and a tail of two tasks, each by its own optimizer."""

    trains_at_server: ClassVar[bool] = False
    """Whether the server of networked clients trains a part of the model itself."""

    can_offload: ClassVar[tuple[str, ...]] = ()
    """Valid values of the field `offload`; empty if the strategy has no such field."""

    mean_of: ClassVar[str] = ""
    """Name of the models whose mean is measured, if no participant trains or has that mean model.

    Tables show the name, and mark the mean as the best of no metric.
    """

    own_data: ClassVar[bool] = False
    """Whether the ranks may have per-rank training data (`dure.data.rank_examples`)."""

    samples: ClassVar[frozenset[SamplingRequest]] = frozenset()
    """Supported samplings of the data owner's batches (`dure.data.sampling`).

    They apply in a world of ranks or of threads, and in a world of clients if that is the
    strategy's own kind.
    """

    follows_model: ClassVar[bool] = False
    """Whether simulated clients compute on the device of the task's model, on a GPU too."""

    trains_with: ClassVar[frozenset[Part]] = frozenset()
    """Supported options of `dure.contracts.training_options`; other options are refused by name."""

    without: ClassVar[frozenset[str]] = frozenset()
    """Conditions of clients that the strategy does not support and refuses."""

    @property
    def label(self) -> str:
        """Label for tables: the name, and the fields that matter."""
        return self.name

    def cannot(self, part: Part, kind: Kind) -> str | None:
        """Return the reason why a training option is unsupported in a world of `kind`, or None.

        Called only for options that the task uses.
        """
        return None if part in self.trains_with else "this system does not implement it"

    def cannot_own_loss(self, kind: Kind) -> str | None:
        """Return why a model with its own loss (`dure.OwnLoss`) is unsupported, or None."""
        return None

    @property
    def deterministic(self) -> bool:
        """Whether runs are reproducible bit for bit."""
        return True

    @property
    def uses_poisson_sampling(self) -> bool:
        """Whether example-level differential privacy draws batches by Poisson sampling."""
        return False

    @property
    def spares_memory(self) -> bool:
        """Whether freed memory is returned at once rather than reused in the next step."""
        return False

    @property
    def protects(self) -> bool:
        """Whether the strategy hides the examples from other parties: no example is then shown."""
        return False

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that the ranks need and that take seconds to import.

        The ranks import them at their start.
        """
        return ()

    @property
    def ranks(self) -> int | None:
        """Number of ranks that the fields require; None if any number is valid."""
        # As many as the default world starts.
        return 1 if self.alone else None

    @property
    def computes_on(self) -> tuple[str, ...]:
        """Names of the devices in the fields, as `World.computes_on`; empty without such fields."""
        return ()

    @classmethod
    def supported_worlds(cls) -> tuple[Kind, ...]:
        """Return the supported kinds of worlds; the strategy's own kind is the first."""
        return cls.kind, *cls.additional_worlds

    def label_in(self, kind: Kind) -> str:
        """Return the label for tables in a world of `kind`."""
        return self.additional_worlds.get(kind, self.label)

    def holds_parts(self, workers: int | None) -> bool:
        """Return whether each worker has, and needs memory for, only a part of the model.

        The undivided model is then created in files (`dure.memory.file_backed_init`).
        """
        return False

    @property
    def offloaded(self) -> Collection[str]:
        """Names of the state that is in files while it is not needed, as in `can_offload`."""
        return ()

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

    def check(self, task: Task, workers: int | None) -> None:
        """Raise ValueError, before any work, if the fields do not fit.

        The fields may not fit each other, the task or the number of workers.
        """

    def check_in(self, world: World) -> None:
        """Raise ValueError if a field is invalid in the world."""

    def check_under(self, task: Task, model: nn.Module, conditions: Conditions) -> None:
        """Raise ValueError if the conditions of clients do not fit the strategy or the task."""

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Raise ValueError if the strategy cannot train the task's model.

        The model stays unchanged, because it is the model that will be trained.
        """

    def prove(self, task: Task, model: nn.Module, workers: int | None) -> Proof | None:
        """Run `check_model`, and then compare the strategy's assumptions with the model itself.

        An assumption is, for example, that a trace computes the model's function. None if there are
        no assumptions. Assumptions that only the ranks together can test are tested by their
        learners. The model stays unchanged. Raises ValueError, with the place of the difference.
        """
        self.check_model(task, model, workers)
        return None

    def measures(self, task: Task, model: nn.Module, conditions: Conditions | None) -> list[str]:
        """Return the names of the metrics of the learner's `evaluate`.

        A run may have targets for these metrics. conditions: conditions of the clients, in a world
        of clients. Empty without evaluation.
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


def seeded_model(task: Task, seed: int) -> nn.Module:
    """Return a new model under the run's seed, with equal weights on every rank and strategy."""
    # The factory draws under the run's seed; the caller's generators are restored afterwards.
    before = generators_state()
    used = in_use()
    try:
        seed_generators(seed, "model", everything=True)
        model = task.model()
        # The factory initialised the accelerator itself and drew before it was seeded.
        if in_use() and not used:
            seed_generators(seed, "model", everything=True)
            model = task.model()
    finally:
        restore_generators(before)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the task's model function returned a {type(model).__name__}, not an nn.Module"
        )
    model = unwrap_compiled(model)
    make_writable(model)
    # Weights of an adapted model, such as a run's, have the names of its adapters.
    adapted = task.weights is not None and holds_adapters(task.weights)
    if adapted:
        _adapt(model, task, seed)
    if task.weights is not None:
        load_initial_weights(model, task.weights)
    if not adapted:
        _adapt(model, task, seed)
    return compile_in_place(model, task.compile)


def _adapt(model: nn.Module, task: Task, seed: int) -> None:
    """Add the task's adapters, if any, drawn under the run's seed."""
    if task.adapter is None:
        return
    before = generators_state()
    try:
        seed_generators(seed, "adapter")
        task.adapter.apply(model)
    finally:
        restore_generators(before)


def unused_copy(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """Return a new unused model like the run's: a copy if possible.

    The task's factory, which may read its model from a disk, is called again only if the model
    cannot be copied. If the model is in files, so is the copy.
    """
    with in_files_like(model):
        twin = copy_of(model)
        # The copy is not compiled yet.
        if twin is not None:
            return compile_in_place(twin, task.compile)
        made = seeded_model(task, seed)
        home = device_of_model(model)
        return made if home == device_of_model(made) else made.to(home)


def examples_for(task: Task) -> tuple[Examples, Examples | None]:
    """Return (train, test) with inputs in `Task.dtype`; unchanged if the task has none.

    test: with the validation set, if the task has one.
    """
    test = task.test
    if isinstance(task.validation, Examples):
        # Both sets are always measured together.
        test = EvaluationExamples(test, task.validation)
    dtype = task.dtype
    if dtype is None:
        return task.train, test
    return task.train.to(dtype), None if test is None else test.to(dtype)
