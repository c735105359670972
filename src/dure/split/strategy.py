"""Base of all split learning systems: their settings, and checks of models and tasks.

    one cut      a = head(x)  ->  a, y at the server: loss, backward  ->  dL/da  ->  backward
    two cuts     a = head(x)  ->  h = middle(a)  ->  the loss at the client  ->  dL/dh  ->  dL/da:
                 the server never sees a label (the U-shape)

    bytes of a step    one cut: values and targets up, gradients down
                       two cuts: values and gradients up, values and gradients down
                       compressed: see `dure.split.coding`

A subclass defines the order in which clients train (`order`), and the rules.

Sources: Gupta and Raskar 2018, "Distributed Learning of Deep Neural Network over Multiple Agents";
Vepakomma et al. 2018, "Split Learning for Health".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from dure.arguments import at_least, between, check_ranges
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.compression import parse as parse_compression
from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.learner import Learner, Proof
from dure.contracts.stop import Stop
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.world import Kind, RankContext, World
from dure.data import partition
from dure.data.batches import check_batch_size
from dure.data.partition import IID, Partition, PartitionDescription, describe
from dure.errors import warn
from dure.fleet.conditions import conditions_of
from dure.parallel.pipeline.cut import CutModel
from dure.protocol.server_context import channels_in
from dure.settings import parse_fields
from dure.split import personalised
from dure.split.client import Rules
from dure.split.compressed import CompressedCutModel, check_compression, exchange_of
from dure.split.conditions import LABELS_APART, WITHOUT, check_conditions
from dure.split.cutting import check_at, check_optimizer, cut_at, prove
from dure.split.leakage import Defence, NoDefence, parse_defence
from dure.split.messages import SideState
from dure.split.orders import Amounts, TurnOrder
from dure.split.plan import SplitPlan
from dure.split.separate_models.checks import check_parts, notes_on_head
from dure.split.separate_models.proof import prove as prove_parts
from dure.split.separate_models.sides import SeparateDividedModel, cut_of
from dure.split.sides import SideRunner
from dure.split.simulated import SimulatedSplitLearner
from dure.tasks.batch_norm import check_own_batches
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.parts import PARTS, JoinedTask, ModelParts
from dure.tensors.flat import check_no_shared_memory

if TYPE_CHECKING:
    from typing_extensions import Self


CANNOT: Mapping[Feature, str] = {
    "clip_norm": "the norm needs the whole gradient, but each side of the cut has only its part",
    "precision": "values and gradients at the cut have the precision of the weights",
    "ema": "no side has the whole model to average",
    "compile": "no side calls the whole model, which would be compiled",
    "adapter": "a cut divides the layers of the model by their names, which adapters change",
    "own_loss": LABELS_APART,
}
"""Parts of a task that a divided model does not support, with the reasons."""


@dataclass(frozen=True)
class Split(Strategy):
    """A model that is divided between clients, who have the data, and a server.

    Args:
        cut: place of the cut: a module's name or a number of layers; two places leave the end of
            the model, and the labels, at the client. By default a task of two files is cut between
            them, and any other model after its first layer.
        clients: K; None is 10, or a client for each key with the partition natural-key.
        local_epochs: E, epochs of a client over its data in a round.
        batch_size: B, of a client's step; None is all of its data.
        partition: division of the examples over clients: iid, label-shards:2, dirichlet:0.5,
            quantity-skew:1, feature-skew:0.8 or blocks:2.
        defence: protection against leakage at the cut: none, marvell:4, max-norm:1, isotropic:1,
            no-peek:1 or randomised-response:1.
        measure_leaks: whether a meter measures, every round, how well the server could guess labels
            and how much of the inputs it sees; in simulations.
        compression: of the values at the cut: none, bfloat16, float16, int8 or top-k:0.1.
        personal_heads: whether every client has its own head, which is never sent and not averaged:
            only the tail is shared.
        held_out: fraction of each client's data that it does not train on, to evaluate models with
            personal heads.
    """

    cut: tuple[str, ...] = ()
    clients: int | None = field(default=None, metadata=at_least(1))
    local_epochs: int = field(default=1, metadata=at_least(1))
    batch_size: int | None = 10
    partition: Partition = field(default_factory=IID)
    defence: Defence = field(default_factory=NoDefence)
    measure_leaks: bool = False
    compression: Compression = field(default_factory=NoCompression)
    personal_heads: bool = False
    held_out: float = field(default=0.0, metadata=between(0, 1, "[)"))

    traits: ClassVar[Traits] = Traits(
        kind="clients",
        unit="round",
        trains_with=frozenset({"unfreeze"}),
        without=WITHOUT - {"availability", "drop_out"},
        trains_parts=True,
        trains_at_server=True,
    )
    joins: ClassVar[bool] = False
    """Whether the server concatenates batches of several clients."""

    title: ClassVar[str]

    def __post_init__(self) -> None:
        parse_fields(
            self,
            {
                "partition": partition.parse,
                "defence": parse_defence,
                "compression": parse_compression,
            },
        )
        # With natural clients the data determine the number; other partitions have a default.
        if self.clients is None:
            object.__setattr__(self, "clients", self.partition.clients_by_default)

    def planned(self, task: Task, stop: Stop) -> Self:
        if self.clients is not None:
            return self
        names = self.partition.names(None, task.train.keys)
        return self if names is None else replace(self, clients=len(names))

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(protects=not isinstance(self.defence, NoDefence))

    @property
    def count(self) -> int:
        """Number of clients. Raises ValueError if it is unknown without the clients' data."""
        if self.clients is None:
            raise ValueError(
                "the number of clients is missing, and the data have no keys that define it: "
                "give clients"
            )
        return self.clients

    @abstractmethod
    def rules(self) -> Rules:
        """Return the agreement between clients and the server."""

    @abstractmethod
    def order(
        self, amounts: Amounts, head: SideState | None, tail: Callable[[int], SideRunner], seed: int
    ) -> TurnOrder:
        """Return the order of turns."""

    @property
    def label(self) -> str:
        shape = ", labels stay" if self.labels_stay else ""
        where = f" at {' and '.join(self.cut)}" if self.cut else ""
        own = ", personal heads" if self.personal_heads else ""
        fewer = f", {self.compression}" if self.compression.compresses else ""
        return f"{self.title}{where}{shape}{own}{fewer}"

    def of(self, task: Task) -> Split:
        """Return the same settings with the place of the cut, from the task or the default.

        Raises ValueError for another place than that of the task's files.
        """
        if not isinstance(task, PARTS):
            return self if self.cut else replace(self, cut=("1",))
        at = cut_of(task)
        if self.cut and self.cut != at:
            raise ValueError(
                f"cut is {' '.join(self.cut)}, but the task has two files, which already divide "
                "the model: leave cut out"
            )
        return replace(self, cut=at)

    @property
    def labels_stay(self) -> bool:
        """Whether the end of the model is at the client."""
        return len(self.cut) == 2

    @property
    def plan(self) -> SplitPlan:
        """Plan of the run for learners."""
        return SplitPlan(
            clients=self.count,
            at=self.cut,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size,
            partition=self.partition,
            rules=self.rules(),
            order=self.order,
            defence=self.defence,
            measure_leaks=self.measure_leaks,
            compression=self.compression,
            personal_heads=self.personal_heads,
            held_out=self.held_out,
        )

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        return CANNOT.get(feature)

    def check(self, task: Task, world: World) -> None:
        if isinstance(task, PARTS) and task.unfreeze is not None:
            raise ValueError(
                "unfreeze names parameters of a whole model, but the task has two files: freeze "
                "them there (requires_grad_(False)), or leave it out"
            )
        self.of(task)._check(task)
        for name in ("personal_heads", "held_out", "measure_leaks"):
            if world.serves and getattr(self, name):
                raise ValueError(
                    f"{name} is for simulations, where all heads and labels are available: leave "
                    "it out over a network"
                )
        check_conditions(conditions_of(world), self.traits.without)

    def _check(self, task: Task) -> None:
        check_at(self.cut)
        check_batch_size(self.batch_size)
        check_ranges(self)
        if self.held_out and not self.personal_heads:
            raise ValueError(
                "held_out evaluates models with personal heads, but all clients share one head: "
                "give personal_heads too"
            )
        # The server of a network may have no data.
        if len(task.train):
            self.partition.divide(self.clients, task.train)
            self.defence.check(task.train, self.labels_stay)
        check_compression(self.compression)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Divide a copy of the model. Raises ValueError if the model cannot be divided."""
        one = self.of(task)
        if isinstance(task, PARTS):
            one._check_parts(task, model)
        else:
            one._check_model(task, model)
            one._cut(task, model)

    def _check_parts(self, task: Task, model: nn.Module) -> None:
        """Run trials on copies of the parts that this process has."""
        if self.compression.compresses:
            raise ValueError(
                f"compression is {self.compression}, which needs a model that is cut by tracing, "
                "but the task has two files: leave compression out, or let the head return fewer "
                "numbers"
            )
        twin = unused_copy(model, task, 0)
        assert isinstance(twin, ModelParts)
        check_parts(task, twin)
        if isinstance(task, JoinedTask):
            self._check_model(task, model)
            train, _ = examples_for(task)
            apart = SeparateDividedModel(task, twin, train, self._examples(task), 0)
            if self.joins or self.defence.guards in ("activations", "gradients"):
                apart.server.crossings()
        if twin.head is not None:
            for note in notes_on_head(twin, examples_for(task)[0]):
                warn(note)

    def _check_model(self, task: Task, model: nn.Module) -> None:
        together = None if self.batch_size is None else self.batch_size * self.count
        check_own_batches(task, model, together, self.count)
        train, _ = examples_for(task)
        if self.labels_stay and self.rules().sums and CountedLoss(task.loss, train).is_late:
            raise ValueError(
                "the loss returns its count only when it is computed, but clients with the end "
                "of the model need their shares before: cut once, or train in turn"
            )

    def _cut(self, task: Task, model: nn.Module) -> CutModel:
        """Return a cut copy of the model, since the model itself will be trained."""
        check_no_shared_memory(model)
        check_optimizer(task, model)
        cut = cut_at(task, unused_copy(model, task, 0), self.cut, self._examples(task))
        if exchange_of(self.compression, cut) is not None:
            CompressedCutModel(cut, self.compression)
        return cut

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Compare the parts with the undivided model on one batch."""
        one = self.of(task)
        if isinstance(task, PARTS):
            one._check_parts(task, model)
            # A single part has no undivided model to compare with.
            if not isinstance(task, JoinedTask):
                return None
            return prove_parts(task, model, one._examples(task))
        one._check_model(task, model)
        # Tracing is the most expensive step, so the copy cut for the checks is reused.
        return prove(task, model, one._cut(task, model))

    def _examples(self, task: Task) -> int:
        own = max(1, len(task.train) // self.count)
        return own if self.batch_size is None else min(self.batch_size, own)

    def measures(self, task: Task, model: nn.Module, world: World) -> list[str]:
        """Return the names of the metrics: on the test data, and on clients' held-out data."""
        own = personalised.names(task) if self.held_out else []
        return super().measures(task, model, world) + own

    def division(self, task: Task, seed: int) -> PartitionDescription | None:
        train = task.train
        parts = self.partition.divide(self.count, train, seed)
        return describe(self.partition, parts, train.labels(), train.classes)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        one = self.of(task)
        channels = channels_in(context)
        if channels is not None:
            # Imported here because the network needs libraries that a simulation does not.
            from dure.split.network.served import ServedSplitLearner

            return ServedSplitLearner(task, context, seed, one.plan, channels)
        return SimulatedSplitLearner(task, context, seed, one.plan)
