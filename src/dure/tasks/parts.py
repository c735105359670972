"""A model in two files: the head of the data's owner, and the tail of a server.

    head.py    task = HeadTask(model=make_head, train=...)              tail.py    task = TailTask(
               labels stay: end=make_end, loss=...                                 model=make_tail,
                                                                                   loss=...)
    undivided  end(tail(head(x)));  without an end: tail(head(x)), and the loss is the tail's

Each file is written, and executed, without the other. `joined` combines both tasks, for simulations
and for training the undivided model.

All three make a `ModelParts`, whose parameters are called head.…, tail.… and end.… on every side.
Every part draws its initial weights from a seed of its own, so that they are the same separately
and together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.contracts.task import Loss, Task
from dure.contracts.training_options import training_options_of
from dure.randomness.seeds import seed_generators

MakeModule = Callable[[], nn.Module]

PLACES = ("head", "tail", "end")
"""Parts in the order of computation: 0 and 2 are on the client, 1 is on the server."""


class ModelParts(nn.Module):
    """The parts of a model that are here, in sequence; None for a part on another machine.

    A call computes the available parts: a head alone returns the activations that leave it, a tail
    alone takes them.
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
        """Parts that are here, by their index in `PLACES`."""
        found = ((place, getattr(self, name)) for place, name in enumerate(PLACES))
        return {place: part for place, part in found if part is not None}

    def only(self, *names: str) -> ModelParts:
        """Return some of the parts: the same modules, without references to the others."""
        return ModelParts(**{name: getattr(self, name) for name in names})

    def forward(self, inputs: Any) -> Any:
        """Apply the parts in order. Raises ValueError if a part in the middle is missing."""
        parts = self.there
        if parts and len(parts) != max(parts) - min(parts) + 1:
            raise ValueError(
                "the server has the tail, and head and end are not connected without it"
            )
        values = inputs
        for part in parts.values():
            values = part(values)
        return values


@dataclass(frozen=True)
class _Parts:
    """Makes the parts, each under a seed derived from the current seed."""

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
                    f"the function for the {name} returned a {type(made[name]).__name__}, not an "
                    "nn.Module"
                )
        return ModelParts(**made)


def _own(model: MakeModule, name: str) -> MakeModule:
    """Return the user's function, also after `dataclasses.replace` of another task."""
    made: MakeModule = getattr(model, name) if isinstance(model, _Parts) else model
    return made


def _elsewhere(outputs: Any, targets: Any) -> Any:
    """Placeholder for a loss of the other side; raises ValueError."""
    raise ValueError("the loss is in the other file and is computed there")


def has_loss(task: Task) -> bool:
    """Return whether the loss is on this side."""
    return task.loss is not _elsewhere


@dataclass(frozen=True)
class HeadTask(Task):
    """Task of a client of split learning: the data, and the model up to the cut.

    Args:
        model: makes the head. Its result leaves the client: a tensor, or a tuple, list or dict of
            tensors, numbers and texts, nested at will; the tail gets it as its only argument.
        end: makes the last layers, if they and the labels stay with the client (U-shape); called
            with the tail's result.
        loss: of the end's outputs; only with an end.
        train, test, metrics, features, ...: as in `Task`.
        optimizer, lr_schedule: of head and end.

    Raises ValueError if these do not fit together.
    """

    loss: Loss = _elsewhere
    end: MakeModule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end is not None and (
            not callable(self.end) or isinstance(self.end, (nn.Module, Optimizer))
        ):
            raise ValueError(
                "HeadTask(end=...) has to be a function that returns a new module, not an instance"
            )
        if self.end is None and has_loss(self):
            raise ValueError(
                "HeadTask has a loss but no end: without an end the labels are sent to the "
                "server, whose TailTask has the loss; give an end too, or leave the loss out"
            )
        if self.end is not None and not has_loss(self):
            raise ValueError(
                "HeadTask has an end, so the labels stay with the client, but no loss: give the "
                "loss here"
            )
        object.__setattr__(self, "model", _Parts(head=_own(self.model, "head"), end=self.end))


@dataclass(frozen=True)
class TailTask(Task):
    """Task of the server of split learning: the model behind the cut, and no data.

    Args:
        model: makes the tail, which is called with a head's result.
        loss: of the tail's outputs; left out if the client has the end of the model, with the loss.
        optimizer, lr_schedule: of the tail.

    Raises ValueError if there are data.
    """

    loss: Loss = _elsewhere

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.train) or self.test is not None:
            raise ValueError(
                "TailTask has data, but the server needs none: give them to the HeadTask"
            )
        object.__setattr__(self, "model", _Parts(tail=_own(self.model, "tail")))


@dataclass(frozen=True)
class JoinedTask(Task):
    """A head's task and a tail's as one; made by `joined`."""

    head: HeadTask = field(kw_only=True)
    tail: TailTask = field(kw_only=True)

    def on(self, device: torch.device) -> JoinedTask:
        own = super().on(device)
        head, tail = self.head.on(device), self.tail.on(device)
        if own is self and head is self.head and tail is self.tail:
            return self
        return replace(own, head=head, tail=tail)


PartTask = HeadTask | TailTask
PARTS = (HeadTask, TailTask, JoinedTask)
"""Tasks whose models are `ModelParts`."""


def joined(head: HeadTask, tail: TailTask, name: str | None = None) -> JoinedTask:
    """Return a task of a head's and a tail's: the model is the tail after the head.

    The data and the metrics are the head's. name: name in tables; by default the head's.

    Systems of split learning train each part by its own optimizer. All others train the model as a
    whole, which requires both tasks to have the same optimizer and the same schedule.

    Raises ValueError for other tasks, or unless exactly one of the two has a loss.
    """
    if not isinstance(head, HeadTask) or not isinstance(tail, TailTask):
        raise ValueError(
            f"joined(head, tail) takes a HeadTask and a TailTask, not a {type(head).__name__} and "
            f"a {type(tail).__name__}"
        )
    if head.end is not None and has_loss(tail):
        raise ValueError(
            "both tasks have a loss: the head's task has an end, so the labels stay with the "
            "client; leave the tail's loss out"
        )
    if head.end is None and not has_loss(tail):
        raise ValueError(
            "neither task has a loss: give it to the tail's task, which receives the labels, or "
            "to the head's task together with an end"
        )
    as_one = (
        _same(head.optimizer, tail.optimizer)
        and _same(head.lr_schedule, tail.lr_schedule)
        and training_options_of(head) == training_options_of(tail)
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
        **(training_options_of(head) if as_one else {}),
        eval_batch_size=head.eval_batch_size,
        metric_memory=head.metric_memory,
        features=head.features,
        head=head,
        tail=tail,
    )


def _two_optimizers(parameters: Any) -> Optimizer:
    """Placeholder for the optimizer of a model with several; raises ValueError."""
    raise ValueError(_TWO)


_TWO = (
    "head and tail have different optimizers, schedules or fields such as clip_norm, but this "
    "system trains the model as a whole: give both tasks the same, or train by split, "
    "parallel-split or split-fed"
)


def _same(one: Any, other: Any) -> bool:
    """Return whether two functions are the same, or partial calls with the same arguments."""
    if isinstance(one, partial) and isinstance(other, partial):
        mine = (one.func, one.args, sorted(one.keywords.items()))
        theirs = (other.func, other.args, sorted(other.keywords.items()))
        # A learning rate may be a tensor, which has no plain comparison.
        return repr(mine) == repr(theirs)
    return one is other


def check_whole(task: Task, takes_parts: bool, serves: bool) -> None:
    """Raise ValueError for a task of head, tail or both that cannot be trained in this way.

    takes_parts: whether the system trains each part by its own optimizer. serves: whether clients
    are on other machines.
    """
    if isinstance(task, (HeadTask, TailTask)) and not (takes_parts and serves):
        this, other = ("head", "tail") if isinstance(task, HeadTask) else ("tail", "head")
        raise ValueError(
            f"this task has only the {this}: to train it here together with the {other}, join "
            "both with dure.joined(head, tail)"
        )
    if isinstance(task, JoinedTask) and not takes_parts and task.optimizer is _two_optimizers:
        raise ValueError(_TWO)


def parts_of(task: Task) -> Iterator[tuple[str, PartTask]]:
    """Yield the name and the task of each side that a task has."""
    if isinstance(task, JoinedTask):
        yield "head", task.head
        yield "tail", task.tail
    elif isinstance(task, HeadTask):
        yield "head", task
    elif isinstance(task, TailTask):
        yield "tail", task
