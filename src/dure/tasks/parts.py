"""A model in two files: the head of whoever has the data, and the tail of a server.

    head.py    task = HeadTask(model=make_head, train=...)              tail.py    task = TailTask(
               labels stay: end=make_end, loss=...                                 model=make_tail,
                                                                                   loss=...)

    undivided  end(tail(head(x)));  without an end: tail(head(x)), and the loss is the tail's

Each file is written, and run, without the other. `joined` makes one task of the two, for
simulations and for whoever trains the model undivided.

All three make a `ModelParts`, whose parameters are called head.…, tail.… and end.… whoever has
them. Every part draws its first weights from a seed of its own, so that they are the same alone and
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.contracts.learning import asked_of
from dure.contracts.task import Loss, Task
from dure.randomness.seeds import seed_generators

MakeModule = Callable[[], nn.Module]

PLACES = ("head", "tail", "end")
"""The parts in the order of their computation: 0 and 2 are with the client, 1 with the server."""


class ModelParts(nn.Module):
    """The parts of a model that are here, one after another; None is elsewhere.

    Called, it computes what the model computes, as far as its parts are here: a head alone gives
    what leaves it, a tail alone takes that.
    """

    head: nn.Module | None
    tail: nn.Module | None
    end: nn.Module | None

    def __init__(
        self,
        head: nn.Module | None = None,
        tail: nn.Module | None = None,
        end: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.tail = tail
        self.end = end

    @property
    def there(self) -> dict[int, nn.Module]:
        """The parts that are here, by their places in `PLACES`."""
        found = ((place, getattr(self, name)) for place, name in enumerate(PLACES))
        return {place: part for place, part in found if part is not None}

    def only(self, *names: str) -> ModelParts:
        """Some of the parts: the same modules, and no way to the others."""
        return ModelParts(**{name: getattr(self, name) for name in names})

    def forward(self, inputs: Any) -> Any:
        """Raises ValueError where a part in the middle is elsewhere."""
        parts = self.there
        if parts and len(parts) != max(parts) - min(parts) + 1:
            raise ValueError("the tail is with the server, and nothing leads from head to end")
        values = inputs
        for part in parts.values():
            values = part(values)
        return values


@dataclass(frozen=True)
class _Parts:
    """Makes the parts, each under a seed that follows from the one that is in force."""

    head: MakeModule | None = None
    tail: MakeModule | None = None
    end: MakeModule | None = None

    def __call__(self) -> ModelParts:
        seed = torch.initial_seed()
        made: dict[str, nn.Module] = {}
        for place, name in enumerate(PLACES):
            make = getattr(self, name)
            if make is None:
                continue
            seed_generators(seed, "part of a model", place, everything=True)
            made[name] = make()
            if not isinstance(made[name], nn.Module):
                raise ValueError(
                    f"the function that makes the {name} returned a {type(made[name]).__name__}, "
                    f"not an nn.Module"
                )
        return ModelParts(**made)


def _own(model: MakeModule, name: str) -> MakeModule:
    """The user's function, also where a task is made of another one by `dataclasses.replace`."""
    made: MakeModule = getattr(model, name) if isinstance(model, _Parts) else model
    return made


def _elsewhere(outputs: Any, targets: Any) -> Any:
    """Stands for a loss that the other side has."""
    raise ValueError("the loss is in the other file, and is computed there")


def has_loss(task: Task) -> bool:
    """Whether the loss is this side's."""
    return task.loss is not _elsewhere


@dataclass(frozen=True)
class HeadTask(Task):
    """What a client of split learning has: the data, and the model up to the cut.

    model: makes the head. What it returns leaves the client: a tensor, or a tuple, list or dict of
        tensors, numbers and texts, nested as wanted; the tail is called with the same as its one
        argument.
    end: makes the last layers, where they and the labels stay with the client (U-shape); called
        with what the tail returns.
    loss: of the end's outputs; with an end alone.
    train, test, metrics, features, ...: as in `Task`.
    optimizer, lr_schedule: of head and end.

    Raises ValueError where these do not go together.
    """

    loss: Loss = _elsewhere
    end: MakeModule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end is not None and (
            not callable(self.end) or isinstance(self.end, (nn.Module, Optimizer))
        ):
            raise ValueError(
                "HeadTask(end=...) has to be a function that makes a fresh module, not an instance"
            )
        if self.end is None and has_loss(self):
            raise ValueError(
                "HeadTask has a loss and no end: without an end the labels go to the server, whose "
                "TailTask has the loss; give end too, or leave the loss out"
            )
        if self.end is not None and not has_loss(self):
            raise ValueError(
                "HeadTask has an end, with which the labels stay, and no loss: give the loss here"
            )
        object.__setattr__(self, "model", _Parts(head=_own(self.model, "head"), end=self.end))


@dataclass(frozen=True)
class TailTask(Task):
    """What the server of split learning has: the model behind the cut, and no data.

    model: makes the tail, which is called with what a head has returned.
    loss: of the tail's outputs; left out where the client has the end of the model, with the loss.
    optimizer, lr_schedule: of the tail.

    Raises ValueError where there are data.
    """

    loss: Loss = _elsewhere

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.train) or self.test is not None:
            raise ValueError(
                "TailTask has data, which a server has none of: they belong to the HeadTask"
            )
        object.__setattr__(self, "model", _Parts(tail=_own(self.model, "tail")))


@dataclass(frozen=True)
class JoinedTask(Task):
    """A head's task and a tail's as one; made by `joined`."""

    head: HeadTask = field(kw_only=True)
    tail: TailTask = field(kw_only=True)


PartTask = HeadTask | TailTask
PARTS = (HeadTask, TailTask, JoinedTask)
"""The tasks whose models are `ModelParts`."""


def joined(head: HeadTask, tail: TailTask, name: str | None = None) -> JoinedTask:
    """One task of a head's and a tail's: the model is the one after the other.

    Its data, and its metrics, are the head's. name: how tables call it; by default as the head's.

    Systems of split learning train each part by its own optimizer. All others train the model as
    one, which they can where both name the same optimizer and the same schedule.

    Raises ValueError for other tasks, or where not one of the two has a loss.
    """
    if not isinstance(head, HeadTask) or not isinstance(tail, TailTask):
        raise ValueError(
            f"joined(head, tail) takes a HeadTask and a TailTask, not a {type(head).__name__} and "
            f"a {type(tail).__name__}"
        )
    if head.end is not None and has_loss(tail):
        raise ValueError(
            "both have a loss: the head's task has an end, with which the labels stay with the "
            "client, so leave the tail's loss out"
        )
    if head.end is None and not has_loss(tail):
        raise ValueError(
            "neither has a loss: give it to the tail's task, to which the labels go, or to the "
            "head's together with an end"
        )
    as_one = (
        _same(head.optimizer, tail.optimizer)
        and _same(head.lr_schedule, tail.lr_schedule)
        and asked_of(head) == asked_of(tail)
    )
    return JoinedTask(
        model=_Parts(_own(head.model, "head"), _own(tail.model, "tail"), head.end),
        loss=head.loss if head.end is not None else tail.loss,
        train=head.train if len(head.train) else None,
        test=head.test,
        optimizer=head.optimizer if as_one else _two_optimizers,
        metrics=head.metrics,
        name=name or head.name,
        lr_schedule=head.lr_schedule if as_one else None,
        **(asked_of(head) if as_one else {}),
        eval_batch_size=head.eval_batch_size,
        metric_memory=head.metric_memory,
        features=head.features,
        head=head,
        tail=tail,
    )


def _two_optimizers(parameters: Any) -> Optimizer:
    """Stands for the optimizer of a model whose parts have different ones."""
    raise ValueError(_TWO)


_TWO = (
    "head and tail have optimizers, schedules or fields such as clip_norm of their own, and this "
    "system trains the model as one: give both tasks the same, or train by split, parallel-split "
    "or split-fed"
)


def _same(one: Any, other: Any) -> bool:
    """Whether two functions are one, or partial calls of one with the same arguments."""
    if isinstance(one, partial) and isinstance(other, partial):
        mine = (one.func, one.args, sorted(one.keywords.items()))
        theirs = (other.func, other.args, sorted(other.keywords.items()))
        # A learning rate may be a tensor, of which there is no plain comparison.
        return repr(mine) == repr(theirs)
    return one is other


def check_whole(task: Task, takes_parts: bool, serves: bool) -> None:
    """Raises ValueError for a task of two files, or of one of them, that cannot be trained so.

    takes_parts: whether the system trains each part by its own optimizer. serves: whether clients
    are elsewhere.
    """
    if isinstance(task, (HeadTask, TailTask)) and not (takes_parts and serves):
        this, other = ("head", "tail") if isinstance(task, HeadTask) else ("tail", "head")
        raise ValueError(
            f"this is the task of a {this} alone: to train it here, with the {other}, make one of "
            f"both by dure.joined(head, tail)"
        )
    if isinstance(task, JoinedTask) and not takes_parts and task.optimizer is _two_optimizers:
        raise ValueError(_TWO)


def parts_of(task: Task) -> Iterator[tuple[str, PartTask]]:
    """The tasks of the sides that a task has, each with its name."""
    if isinstance(task, JoinedTask):
        yield "head", task.head
        yield "tail", task.tail
    elif isinstance(task, HeadTask):
        yield "head", task
    elif isinstance(task, TailTask):
        yield "tail", task
