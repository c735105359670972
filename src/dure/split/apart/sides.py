"""The two sides of a model whose head and tail were written apart.

    client    head, and in the U-shape the end         never has the tail, nor its code
    server    tail                                     never has the head, nor its code

What each needs to know of the other is told once, as data (`dure.split.apart.form`): the client
says what leaves its head, the server, in the U-shape, what leaves its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from dure.collectives.compression import Compression
from dure.data.examples import Examples
from dure.parallel.mesh.check import sample
from dure.split.apart.checks import check_parts, form_of_targets, spare, try_head, try_on
from dure.split.apart.form import Form, decoded, encoded, form_of
from dure.split.apart.stage import ModuleStage
from dure.split.batching import Batching
from dure.split.divided import Divided
from dure.split.leakage.guard import Crossing
from dure.split.sides import Loss, Side, StageAtWork, Stages, weighed
from dure.tasks.flops import forward_flops
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.modes import in_mode
from dure.tasks.parts import HeadTask, JoinedTask, ModelParts, TailTask, has_loss


class ModuleStages(Stages):
    """The modules of one side.

    receives, gives: the forms of what they are called with, and of what leaves them, by place.
    clones: the places of those that write into what they are called with.
    """

    def __init__(
        self,
        model: ModelParts,
        receives: Mapping[int, Form],
        gives: Mapping[int, Form],
        clones: frozenset[int],
        loss: Loss,
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
        # Without a trace nobody knows which of them a pass will change: all of them travel.
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

    def without_gradient(self, stages: Mapping[int, StageAtWork], missed: int) -> Sequence[str]:
        first = stages[self.numbers[0]]
        assert isinstance(first, ModuleStage)
        lost = first.lost(missed)
        first.let_go()
        # What the end has in common with the head got its gradient there.
        ends = [self.parts[number] for number in self.numbers[1:]]
        there = {id(one) for part in ends for one in part.parameters()}
        named = self.model.named_parameters()
        return [name for name, one in named if id(one) in lost and id(one) not in there]

    def passed_on(self, stage: StageAtWork, missed: int) -> int:
        assert isinstance(stage, ModuleStage)
        return stage.unreached(missed)


class ClientPart:
    """What a client has: the head, and the end where labels stay.

    model: of the task, fresh. train: its examples. examples: of a batch, at the most.

    leaving: the form of what leaves the head, for the server. targets: that of what goes with it
    where the loss is the server's.

    Raises ValueError for a head that fails on its examples, or gives what cannot travel.
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

    def side(self, losses: CountedLoss, arriving: Form | None = None) -> Side:
        """What it trains. losses: of its examples. arriving: the form of what comes from the
        server's tail, where labels stay.

        Raises ValueError for an end that does not take that.
        """
        receives: dict[int, Form] = {}
        clones: frozenset[int] = frozenset()
        if (self.model.end is None) != (arriving is None):
            raise ValueError(
                "the loss has to be on one side: give it to the tail's task, to which the labels "
                "go, or to the head's together with an end"
            )
        if self.model.end is not None and arriving is not None:
            receives[2] = arriving
            if try_on(self.model.end, arriving, "the tail", "the end").clones:
                clones = frozenset({2})
        gives = {0: self.leaving}
        loss = weighed(losses)
        return Side(ModuleStages(self.model, receives, gives, clones, loss, self._seed), self.task)


class ServerPart:
    """What the server has: the tail. arriving: the form of what leaves the clients' heads.

    model: of the task, fresh. leaving: the form of what leaves the tail, where labels stay with
    clients; None where the loss is here.

    Raises ValueError for a head and a tail that do not fit.
    """

    def __init__(self, task: TailTask, model: ModelParts, arriving: Form, seed: int) -> None:
        self.task = task
        self.model = model.train()
        self.arriving = arriving
        self._seed = seed
        check_parts(task, model)
        assert model.tail is not None
        tried = try_on(model.tail, arriving, "the head", "the tail")
        sizes = (arriving.few, arriving.many)
        # A loss of its own may take what could not travel.
        self.leaving = None if has_loss(task) else form_of(tried.few, tried.many, sizes, "the tail")
        self._clones = frozenset({1} if tried.clones else ())

    def side(self) -> Side:
        """What it trains."""
        gives = {} if self.leaving is None else {1: self.leaving}
        # It has no examples; what a batch counts, its targets tell.
        loss = weighed(CountedLoss(self.task.loss, None))
        receives = {1: self.arriving}
        return Side(
            ModuleStages(self.model, receives, gives, self._clones, loss, self._seed), self.task
        )

    def batching(self, sizes: Sequence[int]) -> Batching:
        """Clients' batches of these sizes as one."""
        return Batching(self.crossings, sizes)

    def crossings(self) -> list[list[Crossing]]:
        """What is known of the values at each cut.

        Raises ValueError for one of which several cannot be put together.
        """
        forms = [self.arriving] if self.leaving is None else [self.arriving, self.leaving]
        for form in forms:
            form.check_dims()
        return [form.crossings() for form in forms]


class Apart(Divided):
    """Both sides in one process: each has its own modules, and hears of the other as data.

    model: of the task, fresh. train: on what clients train.
    """

    head_is_known = False

    def __init__(
        self, task: JoinedTask, model: ModelParts, train: Examples, examples: int, seed: int
    ) -> None:
        self.at = cut_of(task)
        self.examples = examples
        self._model = model
        self._train = train
        # As a client counts that does not know the server's loss.
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
        counts = _flops(self._model, sample(self._train, 1))
        total = sum(counts)
        # Without a matrix product anywhere, one part is taken to be as long as another.
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

    def crossings(self, few: int, many: int) -> list[list[Crossing]]:
        return self.server.crossings()


def cut_of(task: JoinedTask | HeadTask | TailTask) -> tuple[str, ...]:
    """Where its files say that the model is cut: before these of its modules.

    Each side knows it: labels stay where the head has an end, and where the tail has no loss.
    """
    if isinstance(task, TailTask):
        labels_stay = not has_loss(task)
    else:
        head = task.head if isinstance(task, JoinedTask) else task
        labels_stay = head.end is not None
    return ("tail", "end") if labels_stay else ("tail",)


def _flops(model: ModelParts, inputs: Any) -> list[float]:
    """Of a forward pass over the inputs, part by part."""
    counts: list[float] = []
    values = inputs
    for part in model.there.values():
        with spare(part) as tried, in_mode(tried, training=False), torch.no_grad():
            counts.append(forward_flops(tried, values))
            values = tried(values)
    return counts
