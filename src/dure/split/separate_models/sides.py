"""The two sides of a model with a separate head and tail.

    client    head, and in the U-shape the end         never has the tail, nor its code
    server    tail                                     never has the head, nor its code

Each side receives a description of the other's output once, as data
(`dure.split.separate_models.form`): the client describes the output of its head, and the server, in
the U-shape, the output of its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from dure.collectives.compression import Compression
from dure.data.examples import Examples
from dure.machine.devices import device_of_model, to_device
from dure.parallel.mesh.check import sample
from dure.split.batching import Batching
from dure.split.divided_model import DividedModel
from dure.split.leakage.guard import CutValue
from dure.split.separate_models.checks import (
    check_parts,
    form_of_targets,
    trial_copy,
    try_head,
    try_on,
)
from dure.split.separate_models.form import OutputForm, decoded, encoded, form_of
from dure.split.separate_models.stage import ModuleStage
from dure.split.sides import PartyStage, Side, StageLoss, Stages, weighted_loss
from dure.tasks.flops import forward_flops
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.modes import in_mode
from dure.tasks.parts import HeadTask, JoinedTask, ModelParts, TailTask, has_loss


class ModuleStages(Stages):
    """The modules of one side, as stages.

    Args:
        model: the parts of this side.
        receives: form of the input of each part, by place.
        gives: form of the output of each part, by place.
        clones: places of the parts that write into their inputs, which are therefore cloned.
        loss: loss with shares of the batch.
        seed: seed of the random numbers of the parts.
    """

    def __init__(
        self,
        model: ModelParts,
        receives: Mapping[int, OutputForm],
        gives: Mapping[int, OutputForm],
        clones: frozenset[int],
        loss: StageLoss,
        seed: int,
    ) -> None:
        self.model = model
        self.parts = model.there
        self.numbers = list(self.parts)
        self.receives = receives
        self.gives = gives
        self.clones = clones
        self._loss = loss
        self._seed = seed

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def written(self) -> list[str]:
        # Without a trace the buffers that a pass changes are unknown, so all of them are sent.
        return [name for name, _ in self.model.named_buffers()]

    def stage(self, number: int) -> ModuleStage:
        return ModuleStage(
            number,
            self.parts[number],
            self.receives.get(number),
            self.gives.get(number),
            self._loss,
            number in self.clones,
            self._seed,
        )

    def arriving(self, number: int, examples: int) -> int:
        return sum(one.differentiable for one in self.receives[number].tensors)

    def without_gradient(self, stages: Mapping[int, PartyStage], missed: int) -> Sequence[str]:
        first = stages[self.numbers[0]]
        assert isinstance(first, ModuleStage)
        lost = first.lost(missed)
        first.release()
        # A parameter that the end shares with the head has its gradient from the end.
        ends = [self.parts[number] for number in self.numbers[1:]]
        there = {id(one) for part in ends for one in part.parameters()}
        named = self.model.named_parameters()
        return [name for name, one in named if id(one) in lost and id(one) not in there]

    def passed_on(self, stage: PartyStage, missed: int) -> int:
        assert isinstance(stage, ModuleStage)
        return stage.unreached(missed)


class ClientPart:
    """Part of the model at a client: the head, and in the U-shape the end.

    `leaving` is the form of the head's output, for the server. `targets` is the form of the targets
    that are sent along if the server computes the loss.

    Args:
        task: the head's task.
        model: new instance of the task's model.
        train: the client's examples.
        examples: maximum number of examples of a batch.
        seed: seed of the random numbers of the parts.

    Raises:
        ValueError: the head fails on the examples, or its output cannot be sent.
    """

    def __init__(
        self, task: HeadTask, model: ModelParts, train: Examples, examples: int, seed: int
    ) -> None:
        self.task = task
        self.model = model.train()
        self._seed = seed
        check_parts(task, model)
        assert model.head is not None
        self.leaving = try_head(model.head, train, examples)
        self.targets = form_of_targets(train)

    def side(self, losses: CountedLoss, arriving: OutputForm | None = None) -> Side:
        """Return the parts that the client trains, as a `Side`.

        losses: the loss on the client's examples. arriving: in the U-shape, the form of the output
        of the server's tail.

        Raises ValueError for an end that does not accept that form.
        """
        receives: dict[int, OutputForm] = {}
        clones: frozenset[int] = frozenset()
        if (self.model.end is None) != (arriving is None):
            raise ValueError(
                "the loss has to be on one side: give it to the tail's task, which receives the "
                "labels, or to the head's task together with an end"
            )
        if self.model.end is not None and arriving is not None:
            receives[2] = arriving
            if try_on(self.model.end, arriving, "the tail", "the end").clones:
                clones = frozenset({2})
        gives = {0: self.leaving}
        loss = weighted_loss(losses)
        return Side(ModuleStages(self.model, receives, gives, clones, loss, self._seed), self.task)


class ServerPart:
    """Part of the model at the server: the tail.

    task: the tail's task. model: new instance of the task's model. arriving: the form of the output
    of the clients' heads. `leaving` is the form of the tail's output in the U-shape; None if the
    server computes the loss.

    Raises ValueError for a head and a tail that do not fit.
    """

    def __init__(self, task: TailTask, model: ModelParts, arriving: OutputForm, seed: int) -> None:
        self.task = task
        self.model = model.train()
        self.arriving = arriving
        self._seed = seed
        check_parts(task, model)
        assert model.tail is not None
        tried = try_on(model.tail, arriving, "the head", "the tail")
        sizes = (arriving.few, arriving.many)
        # The server's own loss accepts any output, also one that cannot be sent.
        self.leaving = None if has_loss(task) else form_of(tried.few, tried.many, sizes, "the tail")
        self._clones = frozenset({1} if tried.clones else ())

    def side(self) -> Side:
        """Return the part that the server trains, as a `Side`."""
        gives = {} if self.leaving is None else {1: self.leaving}
        # The server has no examples: it counts those of a batch from the targets.
        loss = weighted_loss(CountedLoss(self.task.loss, None))
        receives = {1: self.arriving}
        return Side(
            ModuleStages(self.model, receives, gives, self._clones, loss, self._seed), self.task
        )

    def batching(self, sizes: Sequence[int]) -> Batching:
        """Return the concatenation of clients' batches of these sizes."""
        return Batching(self.crossings, sizes)

    def crossings(self) -> list[list[CutValue]]:
        """Return the `CutValue` of each value, for each cut.

        Raises ValueError for a value that cannot be concatenated over clients.
        """
        forms = [self.arriving] if self.leaving is None else [self.arriving, self.leaving]
        for form in forms:
            form.check_dims()
        return [form.crossings() for form in forms]


class SeparateDividedModel(DividedModel):
    """Both sides in one process: each has its own modules and only data from the other.

    Args:
        task: the tasks of head and tail.
        model: new instance of the task's model.
        train: the examples on which clients train.
        examples: maximum number of examples of a batch.
        seed: seed of the random numbers of the parts.
    """

    head_is_known = False

    def __init__(
        self, task: JoinedTask, model: ModelParts, train: Examples, examples: int, seed: int
    ) -> None:
        self.at = cut_of(task)
        self.examples = examples
        self._model = model
        self._train = train
        # Counted like at a client, which does not know the server's loss.
        self.losses = CountedLoss(task.head.loss, train)
        self.client = ClientPart(task.head, model.only("head", "end"), train, examples, seed)
        leaving = decoded(encoded(self.client.leaving))
        self.server = ServerPart(task.tail, model.only("tail"), leaving, seed)
        back = self.server.leaving
        arriving = None if back is None else decoded(encoded(back))
        self._heads = self.client.side(self.losses, arriving)
        self._tails = self.server.side()

    @property
    def heads(self) -> Side:
        return self._heads

    @property
    def tails(self) -> Side:
        return self._tails

    @cached_property
    def shares(self) -> Sequence[float]:
        inputs = to_device(sample(self._train, 1), device_of_model(self._model))
        counts = _flops(self._model, inputs)
        total = sum(counts)
        # Without any matrix product, all parts get the same share.
        return [one / total if total else 1 / len(counts) for one in counts]

    @property
    def weights(self) -> Sequence[int]:
        return [
            sum(one.numel() for one in part.parameters() if one.requires_grad)
            for part in self._model.there.values()
        ]

    def message_bytes(self, compression: Compression) -> list[tuple[int, int]]:
        forms = (self.client.leaving, self.server.leaving)
        return [form.nbytes(self.examples) for form in forms if form is not None]

    @property
    def batching(self) -> Callable[[Sequence[int]], Batching]:
        return self.server.batching

    def crossings(self, few: int, many: int) -> list[list[CutValue]]:
        return self.server.crossings()


def cut_of(task: JoinedTask | HeadTask | TailTask) -> tuple[str, ...]:
    """Return the cuts as the names of the parts behind them: ("tail",) or ("tail", "end").

    Each side knows the cuts: the U-shape has an end in the head's task and no loss in the tail's
    task.
    """
    if isinstance(task, TailTask):
        labels_stay = not has_loss(task)
    else:
        head = task.head if isinstance(task, JoinedTask) else task
        labels_stay = head.end is not None
    return ("tail", "end") if labels_stay else ("tail",)


def _flops(model: ModelParts, inputs: Any) -> list[float]:
    """Return the FLOPs of a forward pass over the inputs, for each part."""
    counts: list[float] = []
    values = inputs
    for part in model.there.values():
        with trial_copy(part) as tried, in_mode(tried, training=False), torch.no_grad():
            counts.append(forward_flops(tried, values))
            values = tried(values)
    return counts
