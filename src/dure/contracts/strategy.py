"""What a strategy is, and what it may ask of the place where it runs.

A strategy is a frozen dataclass whose fields are its paper's hyperparameters. It makes a *learner*:
the strategy at work on one rank, advancing one step or one round at a time. `dure.train` drives
every learner with the same loop, which is why every system is measured, stopped, checkpointed and
resumed on the same terms.

A *place* is what a world gives to the one that runs in it. Worlds know no system and systems know
no world; they meet in `dure.train`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dure.arguments import Told
from dure.collectives.group import Group
from dure.contracts.channels import Channels, Hosted
from dure.contracts.learning import Part
from dure.contracts.page import Page
from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.contracts.weights_from import begin_with
from dure.data.examples import Examples
from dure.data.measured import MeasuredExamples
from dure.data.partition import Description
from dure.data.sampling import Way
from dure.fleet.conditions import Conditions
from dure.memory.formula import Shares
from dure.memory.undivided import beside
from dure.protocol.carrier import Carrier, Clients
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.tensors.compiled import compiled_as, under_own_names
from dure.tensors.copies import copy_of
from dure.tensors.writable import make_writable
from dure.wire.layout import Federation

if TYPE_CHECKING:
    from typing_extensions import Self

Kind = Literal["ranks", "threads", "clients"]
"""Three families of worlds.

SPMD ranks over a group; one program with worker threads, on one device or several; a server with
clients.
"""

STOP = 1
CHECKPOINT = 2
INTERRUPT = 4
SPENT = 8
CALLBACK = 16
"""Wishes of rank 0, as bits that travel with a step's message.

STOP: to end. CHECKPOINT: to write a checkpoint. INTERRUPT, with STOP: to end because the user, or
the launcher, asked for it. SPENT, with STOP: to end because clients have used up what they may
transfer; a server says it. CALLBACK, with STOP: to end because a callback asked for it. All ranks
hear of them in the same step, and do the same after it.
"""


class Interrupted(Exception):  # noqa: N818
    """Raised by `advance`: the user wants the run to end, and the step can be gone on with later.

    The learner's state is whole, in the middle of a step.
    """


class Progress(NamedTuple):
    """What one step or round did: the same on every rank."""

    loss: float | None
    """Mean training loss over the joint batch, or the round's examples; None if there were none."""
    samples: int
    """Training examples processed, by all workers together."""
    wish: int = 0
    """The wish that rank 0 gave to this step."""
    numbers: Mapping[str, float] | None = None
    """What else the strategy says about the step, by name, for the history: such as residuals."""
    whole: bool = True
    """Whether the step is done. If not, the run ends in its middle, where `state` is whole too; all
    else is then about what is done of it, and the next `advance`, of a run that is resumed, does
    the rest."""


class Sign(Protocol):
    """A private key. public: the text by which others know it."""

    public: str

    def sign(self, message: bytes) -> bytes:
        """The signature of a message."""


class Proof(NamedTuple):
    """What was tried before training began, and held."""

    what: str
    """In words for the user, such as "the traced program gives what the model gives"."""
    seconds: float
    """How long that took."""


class Learner(ABC):
    """A strategy at work on one rank."""

    unit: str = "step"
    """What it counts: "step" or "round"."""

    where: str
    """Who this is, for errors: "rank 1" or "server"."""

    units_per_epoch: int
    """Steps or rounds in a pass over the training data: the default interval of evaluations.

    Rounds as they are now: a strategy may make them longer in the course of a run.
    """

    parted: bool = False
    """Whether ranks hold different things, such as optimizers that are not kept equal: `part`."""

    proofs: Sequence[Proof] = ()
    """What it has tried while it was made (`Place.check`), the same on every rank."""

    examples: int | None = None
    """Training examples of an epoch, of all workers; None: those of the task."""

    elsewhere: Sequence[str] = ()
    """Tensors of the model that others have, who do not give them here: `weights` is without them.
    """

    resizes: bool = False
    """Whether `restore` makes sense of the parts of another number of ranks as well."""

    averages_parts: bool = False
    """Whether what `averages` gives are parts of tensors, or several of them in one."""

    def averages(self) -> Mapping[str, Tensor]:
        """What an average of the weights is taken of (`Task.ema`): what this rank holds of them.

        By the names of `weights`, unless `averages_parts`. Of a strategy that trains with ema.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method averages")

    def changing_averages(self) -> AbstractContextManager[object]:
        """Around a change of what `averages` gives, on all ranks together."""
        return nullcontext()

    @abstractmethod
    def flops_per_step(self) -> float:
        """Floating-point operations of one optimizer step here.

        Small steps get one thread (`dure.machine.threads`).
        """

    @abstractmethod
    def advance(self, wish: int) -> Progress:
        """Does one step or round. Rank 0 says its `wish`; the others give 0."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """What `Strategy.measures` names, of the model as it is; empty without test data.

        The same on every rank: limits depend on it.
        """

    by_parts: bool = False
    """Whether `restore` takes tensors that lie in files (`dure.record.on_disk`), of which it reads
    what this rank holds; else all of them are in memory."""

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The whole model's state_dict, on rank 0. It may lie in files."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All else that it needs to go on: optimizer state, position, and "buffers".

        Those are the ones that a state_dict leaves out (`passing_buffers`). Tensors may lie in
        files (`dure.record.on_disk`).
        """

    @abstractmethod
    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Goes on from `weights` and `state`. The parts of all ranks are in state["parts"]."""

    @abstractmethod
    def meters(self) -> Sequence[Meter]:
        """The meters of the workers here: this rank's, or the server's and its clients'."""

    def part(self) -> Any:
        """What only this rank holds, as a tree for checkpoints. Called where `parted`."""
        return None

    def exhausted(self) -> str | None:
        """What is used up, so that no further step is possible, such as "epsilon"; None: nothing.

        The same on every rank. It is how `summary.json` says that the run has ended; a resumed run
        is asked before its first step.
        """
        return None

    def ended(self, reason: str) -> None:
        """The run has ended by this limit; "interrupt" where it may go on."""
        return

    def rest(self) -> None:
        """No step follows, and no `state` is asked for: what only these need may go.

        `weights` and `passing_buffers` are asked for once more. Called on all ranks.
        """
        return

    def passing_buffers(self) -> Mapping[str, Tensor]:
        """The buffers that a state_dict leaves out. Called on all ranks."""
        buffers: Mapping[str, Tensor] = self.state()["buffers"]
        return buffers

    def saved(self) -> None:
        """The newest `state` is on the disk: what was kept in case it would not be can go."""
        return

    def numbers(self) -> Mapping[str, float]:
        """What it says of all steps so far, by name, such as an epsilon: asked at evaluations."""
        return {}

    def facts(self) -> dict[str, Any] | None:
        """What lies where, as JSON, for the report; None where there is nothing to say.

        It speaks with no other rank. summary.json has all ranks' facts, in order.
        """
        return None


Value = TypeVar("Value")

MakesPage = Callable[[str, str, bool, Callable[[], Mapping[str, Any]]], Page]


@dataclass
class Place:
    """What a world gives to a program that runs in it.

    group: the ranks, and this one among them.
    trace: this process's timeline.
    report: sends an event to whoever watches the run (rank 0 only).
    interrupted: whether the user asked to stop (rank 0 only).
    wish: what is wished in the middle of a step that is long: STOP, with INTERRUPT or without, or
        0. The driver says it, where this rank alone is driven.
    clock_offset: seconds to add to this machine's clock to get rank 0's.
    kind: of the world.
    devices: where this program computes, one for each of its workers; the first is its own.
    ending: what has to end with the run, such as threads.
    conditions: what the clients of a federation are like.
    carrier: what, given the clients' side and the seed, makes the carrier of messages between a
        coordinator and its clients.
    prepared: hands over the model that was made while the run was prepared.
    check: whether a learner tries what it believes about the model beside the model itself, while
        it is made; it raises ValueError where the two differ.
    network: what, given a federation whose clients are elsewhere, makes the carrier to them.
    channels: what, given a run whose clients are elsewhere and stay connected, opens the channels.
    folder: of the run, where this process writes it. config: what config.json says was asked.
    report_seconds: between two reports of steps at the least: nobody reads faster. signs: whose key
        signs the model at the end; None where nobody does.
    identities: the clients' public keys, by number, which the owner of the federation has signed;
        None where there is no such roster.
    outlives: says that the program goes on when other ranks than the first die, so that the world
        does not end it for that.
    deadline: seconds that ranks wait for one that is silent.
    page: makes the live page of the run, for a listener of the world's: of the token that opens it,
        in words where that is found, whether it comes by TLS, and what a server tells of itself. It
        raises ImportError where nothing draws it.
    """

    group: Group
    trace: Trace = field(default_factory=Trace)
    report: Callable[[dict[str, Any]], None] = lambda event: None
    interrupted: Callable[[], bool] = lambda: False
    wish: Callable[[], int] = lambda: 0
    clock_offset: float = 0.0
    kind: Kind = "ranks"
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    ending: ExitStack = field(default_factory=ExitStack)
    conditions: Conditions | None = None
    carrier: Callable[[Clients, int], Carrier] | None = None
    prepared: Callable[[], nn.Module] | None = None
    check: bool = True
    network: Callable[[Federation], Carrier] | None = None
    channels: Callable[[Hosted], Channels] | None = None
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    report_seconds: float = 0.1
    signs: Sign | None = None
    identities: Mapping[int, str] | None = None
    outlives: Callable[[], None] = lambda: None
    deadline: float = 60.0
    page: MakesPage | None = None

    def model(self, task: Task, seed: int) -> nn.Module:
        """The run's model, fresh: the one that was prepared in this process, or a new one.

        A learner calls it once, and takes copies for whatever else it needs (`another`).
        """
        return seeded_model(task, seed) if self.prepared is None else self.prepared()


class World(Told):
    """Who takes part, and how they reach each other: a frozen dataclass, made by the user.

    Its fields are settings of the place: they are written into run folders, and are flags of the
    command line. A subclass has `name`, `kind` and `run`; the rest has defaults.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]

    @property
    def leads(self) -> bool:
        """Whether this process writes the run folder and talks to the user."""
        return True

    @property
    def rank_here(self) -> int:
        """Which rank this process is, where it was started as one; otherwise the first stands for
        all.
        """
        return 0

    @property
    def workers(self) -> int | None:
        """How many ranks or threads there are; None where the strategy says how many clients."""
        return None

    @property
    def conditions(self) -> Conditions | None:
        """What clients are like, in a world of clients."""
        return None

    @property
    def computes_on(self) -> tuple[str, ...]:
        """The devices of the workers, by name, where the world says which these are."""
        return ()

    @property
    def starts_again(self) -> bool:
        """Whether the ranks may be ended and started again at any time, more or fewer of them."""
        return False

    @property
    def serves(self) -> bool:
        """Whether others have the training data, and this process only serves them."""
        return False

    @property
    def elsewhere(self) -> bool:
        """Whether programs run in other processes than this one, which only waits for them."""
        return False

    def begin(self, imports: Sequence[str] = ()) -> None:
        """Begins what takes time until the ranks can run, while the caller goes on.

        imports: modules that they will need (`Strategy.imports`).
        """

    def ready(self) -> None:
        """Returns once nothing is left to be begun, so that no run is charged for it."""

    def describe(self) -> str:
        """For tables: "2 processes"."""
        return self.name

    def run(
        self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        """Runs `program` on every rank and returns what it returned on rank 0.

        Where each rank called `run` itself, it returns what the program did on this rank. Raises
        the first failure, when all ranks have ended.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method run")


class Strategy(Told):
    """How the learning is divided: a frozen dataclass, made by the user.

    Its fields are the hyperparameters: they are written into run folders, and are flags of the
    command line. A subclass has `name`, `kind`, `unit` and `learner`; the rest has defaults.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    """The kind of worlds in which it is at home."""

    batch_size: int | None = None
    """Examples of a step, as a DataLoader would have them; None: all, or it has no batches."""

    unit: ClassVar[str]
    """What its learner counts: "step" or "round"."""

    also: ClassVar[Mapping[Kind, str]] = {}
    """The other kinds of worlds in which it lives, and its label there."""

    oldest_checkpoint: ClassVar[int] = 1
    """The oldest version of checkpoints (`dure.record.checkpoint.VERSION`) that it can read."""

    moves: ClassVar[frozenset[str]] = frozenset()
    """Fields that only say where the work is done: a run may go on with other values of them."""

    led: ClassVar[bool] = False
    """Whether, in a world of ranks, rank 0 alone has a learner, and the others `assist` it."""

    alone: ClassVar[bool] = False
    """Whether it is one worker, whatever the machine has."""

    trains_parts: ClassVar[bool] = False
    """Whether it trains a head and a tail of two tasks, each by its own optimizer."""

    trains_at_server: ClassVar[bool] = False
    """Whether the server of clients on a network trains a part of the model itself."""

    can_offload: ClassVar[tuple[str, ...]] = ()
    """What its field `offload` may name; it has none where nothing is."""

    mean_of: ClassVar[str] = ""
    """What the measured model is the mean of, where nobody trains or has that model. Tables say so,
    and mark it as the best of no metric."""

    own_data: ClassVar[bool] = False
    """Whether its ranks may have training data of their own (`dure.data.nodes`)."""

    samples: ClassVar[frozenset[Way]] = frozenset()
    """In which ways its owner's batches may be drawn (`dure.data.sampling`), in a world of ranks or
    of threads, and of clients where that is its home."""

    follows_model: ClassVar[bool] = False
    """Whether simulated clients compute where the task's model is made, on a GPU too."""

    trains_with: ClassVar[frozenset[Part]] = frozenset()
    """Which of `dure.contracts.learning` it can do; what it cannot do is refused by name."""

    without: ClassVar[frozenset[str]] = frozenset()
    """Conditions of clients that it does not have, and refuses where they are given."""

    @property
    def label(self) -> str:
        """For tables: the name, and the fields that matter."""
        return self.name

    def cannot(self, part: Part, kind: Kind) -> str | None:
        """Why it cannot do a part of learning in a world of `kind`, in words; None if it can.

        Asked of those parts alone for which the task asks.
        """
        return None if part in self.trains_with else "nothing in it does that"

    def cannot_own_loss(self, kind: Kind) -> str | None:
        """Why it cannot train a model that gives its own loss (`dure.OwnLoss`); None if it can."""
        return None

    @property
    def deterministic(self) -> bool:
        """Whether its runs repeat themselves to the last bit."""
        return True

    @property
    def draws_by_coins(self) -> bool:
        """Whether differential privacy of examples draws its batches, by a coin for each."""
        return False

    @property
    def spares_memory(self) -> bool:
        """Whether memory that is freed goes back at once, rather than waiting for the next step."""
        return False

    @property
    def protects(self) -> bool:
        """Whether it keeps from others what examples are like: then none of them is shown."""
        return False

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that its ranks need and that take seconds to import: they begin with them."""
        return ()

    @property
    def ranks(self) -> int | None:
        """How many ranks the fields ask for; None where any number will do."""
        # As many as the default world starts.
        return 1 if self.alone else None

    @property
    def computes_on(self) -> tuple[str, ...]:
        """The devices that its fields name, as `World.computes_on`; none where they name none."""
        return ()

    @classmethod
    def dwellings(cls) -> tuple[Kind, ...]:
        """The kinds of worlds in which it lives; its home is the first."""
        return cls.kind, *cls.also

    def label_in(self, kind: Kind) -> str:
        """What tables call it in a world of `kind`."""
        return self.also.get(kind, self.label)

    def holds_parts(self, workers: int | None) -> bool:
        """Whether each worker holds only a part of the model, and needs memory for no more.

        Then the undivided model lies in files (`dure.memory.undivided`).
        """
        return False

    @property
    def offloaded(self) -> Collection[str]:
        """The names of what lies in files while it is not needed, as in `can_offload`."""
        return ()

    def shares(self, workers: int | None) -> Shares | None:
        """The least of the model that each worker has in memory while it trains.

        None where that is not known: then nothing is refused for it.
        """
        return None

    def planned(self, task: Task, stop: Stop) -> Self:
        """The strategy with what follows from how long the run is: noise for an epsilon, say.

        Asked before `check`, so that run folders and labels have what was chosen; a run that is
        resumed has it already. Raises ValueError where `stop` does not say how long.
        """
        return self

    def check(self, task: Task, workers: int | None) -> None:
        """Raises ValueError, before any work, if the fields do not fit.

        They may not fit each other, the task or the workers.
        """

    def check_in(self, world: World) -> None:
        """Raises ValueError if a field makes no sense in the world."""

    def check_under(self, task: Task, model: nn.Module, conditions: Conditions) -> None:
        """Raises ValueError if the conditions of clients do not fit the strategy or the task."""

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Raises ValueError if it cannot train the task's model.

        The model stays as it is: it is the one that will be trained.
        """

    def prove(self, task: Task, model: nn.Module, workers: int | None) -> Proof | None:
        """`check_model`, and then what the strategy believes about the model, tried beside it.

        Such as a trace that is to compute what the model computes. None where nothing is believed.
        What only the ranks together can try, their learners do. The model stays as it is. Raises
        ValueError, with the place, where the two differ.
        """
        self.check_model(task, model, workers)
        return None

    def measures(self, task: Task, model: nn.Module, conditions: Conditions | None) -> list[str]:
        """The names of what its learner's `evaluate` gives: the targets that a run may have.

        conditions: what clients are like, in a world of clients. Empty where nothing is evaluated.
        """
        sets = {"test": task.test, "validation": task.validation}
        return [
            f"{which}_{name}"
            for which, examples in sets.items()
            if examples is not None
            for name in ("loss", *task.measures)
        ]

    def division(self, task: Task, seed: int) -> Description | None:
        """How the training data lie with their owners, for the report; None if nobody owns any."""
        return None

    def parts(self, task: Task, seed: int, workers: int | None) -> Sequence[Tensor]:
        """The examples of each who goes through a part of its own, as indices; none elsewhere."""
        return ()

    def assist(self, task: Task, place: Place, seed: int) -> str:
        """Where `led`: what a rank other than the first does until the run has ended.

        Returns by which limit it has.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method assist")

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        """The strategy at work: the model made under `seed`, ready for its first step."""
        raise NotImplementedError(f"{type(self).__name__} has no method learner")


def seeded_model(task: Task, seed: int) -> nn.Module:
    """A fresh model under the run's seed: the same weights on every rank and for every strategy."""
    # The factory draws under the run's seed; the caller's generators go on as if it had not.
    before = generators_state()
    used_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    try:
        seed_generators(seed, "model", everything=True)
        model = task.model()
        # The first factory that uses CUDA in a process has drawn there before it could be seeded.
        if torch.cuda.is_initialized() and not used_cuda:  # type: ignore[no-untyped-call]
            seed_generators(seed, "model", everything=True)
            model = task.model()
    finally:
        restore_generators(before)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the task's model function returned a {type(model).__name__}, not an nn.Module"
        )
    model = under_own_names(model)
    make_writable(model)
    if task.weights is not None:
        begin_with(model, task.weights)
    return compiled_as(model, task.compile)


def another(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """One more model like the run's, which was not used yet: a copy, where it can be copied.

    The task's factory, which may read its model from a disk, is called again only where it cannot.
    Where the model lies in files, so does the copy.
    """
    with beside(model):
        twin = copy_of(model)
        # A copy is called as it is written.
        return seeded_model(task, seed) if twin is None else compiled_as(twin, task.compile)


def examples_for(task: Task) -> tuple[Examples, Examples | None]:
    """Return (train, test) with inputs in `Task.dtype`; unchanged if the task has none.

    test: with the validation set, if the task has one.
    """
    test = task.test
    if isinstance(task.validation, Examples):
        # Whoever measures the one measures both.
        test = MeasuredExamples(test, task.validation)
    dtype = task.dtype
    if dtype is None:
        return task.train, test
    return task.train.to(dtype), None if test is None else test.to(dtype)
