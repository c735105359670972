"""Vertical split learning: parties hold different features of the same people.

    party p      a_p = head_p(x_p),  x_p its columns of the batch     ->  a_p
    holder       join(a_1, ..., a_P) -> tail -> loss, with the labels ->  dL/da_p to each
    all          one step of the task's optimizer on each part

The holder of the labels is a server, or one of the parties. Activations are joined by concatenation
(concat) or by their sum (`dure.split.parties.model`). The computation is that of the undivided
model, and the trajectory is that of a single worker on all columns.

    bytes of a step and party     b B q_p up,  b B q_p down,  for activations of q_p numbers of b
                                  bytes; none for a party that has the labels

A defence applies to outgoing values: noise on gradients at the holder, for each party without
labels (`dure.split.parties.guarded`); NoPeek at each of these parties, for its own columns; labels
are randomised before training.

The rows of a batch follow from the step's number and a seed that all know, and cost no bytes.
Before, parties may have to align the people whom all know (`dure.split.alignment`).

Sources: Vepakomma et al. 2018, "Split Learning for Health"; Ceballos et al. 2020, "SplitNN-driven
Vertical Partitioning".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from dure.arguments import at_least, between, check_ranges
from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import Learner, Proof
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.world import Kind, RankContext, World
from dure.data.batches import check_batch_size
from dure.data.examples import reader_on
from dure.fleet.conditions import conditions_of
from dure.machine.devices import device_of_model
from dure.parallel.optimizer_sharding import check_element_wise, check_parameter_wise
from dure.protocol.server_context import channels_in
from dure.settings import parse_fields
from dure.split.alignment import check_library, id_texts
from dure.split.conditions import LABELS_APART, WITHOUT, check_conditions
from dure.split.leakage import Defence, NoDefence, parse_defence
from dure.split.parties.model import (
    Columns,
    VerticalDivision,
    activations_of,
    check_columns,
    divide,
)
from dure.split.parties.plan import VerticalPlan, ids_of
from dure.split.parties.proof import prove
from dure.split.parties.simulated import SimulatedVerticalLearner
from dure.tasks.batch_norm import check_pieces
from dure.tensors.flat import check_no_shared_memory

_PROOF_EXAMPLES = 8


@dataclass(frozen=True)
class VerticalSplit(Strategy):
    """Parties with different columns train one model, and only activations and gradients are sent.

    Args:
        features: the columns of each party, such as 0-12 13-28; by default those of the model's
            heads, or equal parts.
        parties: number of parties, if features are not given; 2 by default.
        batch_size: B; None is all people in every step.
        label_party: the party that has the labels and the tail; None is a server.
        align: whether parties first align the people whom all of them know.
        id_column: the column of the inputs with people's ids, which no party trains on; by default
            the keys of the task are the ids.
        missing: fraction of people, drawn for each party, that it does not know.
        defence: protection against leakage of labels and columns: none, marvell:4, max-norm:1,
            isotropic:1, no-peek:1 or randomised-response:1.
        measure_leaks: whether a meter measures how well each party could guess labels, and how much
            of its columns the holder sees.
    """

    features: tuple[str, ...] = ()
    parties: int | None = field(default=None, metadata=at_least(1))
    batch_size: int | None = 64
    label_party: int | None = None
    align: bool = False
    id_column: int | None = None
    missing: float = field(default=0.0, metadata=between(0, 1, "[)"))
    defence: Defence = field(default_factory=NoDefence)
    measure_leaks: bool = False

    name: ClassVar[str] = "vertical-split"
    traits: ClassVar[Traits] = Traits(
        kind="clients",
        unit="step",
        without=WITHOUT,
        trains_at_server=True,
    )

    def __post_init__(self) -> None:
        # object.__setattr__ because the dataclass is frozen.
        object.__setattr__(self, "features", tuple(map(_written, self.features)))
        parse_fields(self, {"defence": parse_defence})

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(protects=not isinstance(self.defence, NoDefence))

    @property
    def label(self) -> str:
        labels = "" if self.label_party is None else f", labels with party {self.label_party}"
        return f"vertical split{labels}{', aligned' if self.align else ''}"

    @property
    def plan(self) -> VerticalPlan:
        """Plan of the run for learners."""
        return VerticalPlan(
            features=tuple(map(columns_of, self.features)),
            parties=self.parties,
            batch_size=self.batch_size,
            label_party=self.label_party,
            align=self.align,
            id_column=self.id_column,
            missing=self.missing,
            defence=self.defence,
            measure_leaks=self.measure_leaks,
        )

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "own_loss":
            return LABELS_APART
        return "each party has only a part of the model, with its gradient and optimizer"

    def check(self, task: Task, world: World) -> None:
        if not len(task.train):
            raise ValueError(
                "the label holder needs training data: give Task(train=...), where columns of "
                "other parties may be zeros"
            )
        check_batch_size(self.batch_size)
        check_columns(self.plan.features)
        check_ranges(self)
        if not self.align and (self.missing or self.id_column is not None):
            name = "missing" if self.missing else "id_column"
            raise ValueError(f"{name} needs alignment: give align too")
        if self.align:
            check_library()
            id_texts(ids_of(task.train, self.id_column))
        # The holder of the labels computes the loss, so labels are never sent.
        self.defence.check(task.train, labels_stay=True)
        if world.serves and self.measure_leaks:
            raise ValueError(
                "measure_leaks is for simulations, where all columns and labels are available: "
                "leave it out over a network"
            )
        check_conditions(conditions_of(world), self.traits.without)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Raise ValueError for a model or an optimizer that cannot be divided."""
        division, activations = self._divided(task, model)
        if self.label_party is not None and not 0 <= self.label_party < len(division.heads):
            raise ValueError(
                f"label_party is {self.label_party}, but there are {len(division.heads)} parties, "
                f"from 0"
            )
        if any(self.id_column in columns for columns in division.features):
            raise ValueError(
                f"column {self.id_column} has people's ids, but is a feature of a party: leave it "
                "out of the features"
            )
        check_no_shared_memory(model)
        optimizer = task.optimizer(list(model.parameters()))
        check_parameter_wise(optimizer)
        if division.cuts_parameters:
            check_element_wise(optimizer)
        check_pieces(task, model, self.batch_size, 1)
        self._check_guarded(activations)

    def _check_guarded(self, activations: Sequence[Tensor]) -> None:
        """Raise ValueError for a defence without outgoing values to protect."""
        others = self.plan.others(len(activations))
        if self.defence.guards != "nothing" and not any(
            activations[number].requires_grad for number in others
        ):
            raise ValueError(
                f"{self.defence} has no effect here, because no party without the labels has a "
                "trainable head: leave it out"
            )

    def _divided(self, task: Task, model: nn.Module) -> tuple[VerticalDivision, list[Tensor]]:
        """Return the division of the model, and the heads' outputs for an example."""
        train, _ = examples_for(task)
        inputs, _ = reader_on(train, device_of_model(model))(torch.tensor([0]))
        division = divide(model, inputs, self.plan.features, self.parties)
        return division, activations_of(division, inputs)

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Compare the parts with the undivided model on one batch."""
        self.check_model(task, model, world)
        return prove(task, model, self.plan.features, self.parties, _PROOF_EXAMPLES)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        channels = channels_in(context)
        if channels is not None:
            # Imported here because the network needs libraries that a simulation does not.
            from dure.split.network.parties_served import ServedVerticalLearner

            return ServedVerticalLearner(task, context, seed, self.plan, channels)
        return SimulatedVerticalLearner(task, context, seed, self.plan)


def columns_of(text: str) -> Columns:
    """Return the columns that a text names: "0-2,7" gives (0, 1, 2, 7).

    Raises ValueError for a text that names no columns.
    """
    columns: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(
                f"features has {text!r}, but write a party's columns as 0-12 or 0,3,5-7"
            )
        bounds = int(first), int(last if dash else first)
        columns += range(bounds[0], bounds[1] + 1)
    return tuple(columns)


def _written(columns: str | Sequence[int]) -> str:
    """Return a party's columns as text, from text or numbers."""
    return columns if isinstance(columns, str) else ",".join(map(str, columns))
