"""Summary of a task, which two machines compare to check that they train the same.

No code travels between a server and its clients. Each has the task itself, and they compare its
content: the trained tensors, the frozen weights, the loss, the optimizer with its settings, and the
metrics.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import nn

from dure.contracts.task import Task
from dure.contracts.training_options import Part, training_options_of
from dure.machine.compiler import deferred_compiler
from dure.tensors.frozen import frozen_of
from dure.wire.requests import Machine, TaskDescription
from dure.wire.tensors import digest_of, forms_of, size_of


def trains_of(task: Task, model: nn.Module) -> TaskDescription:
    """Return the summary of a task. model: a model of the task."""
    forms = {
        name: (str(one.dtype).removeprefix("torch."), list(one.shape))
        for name, one in [*model.named_parameters(), *model.named_buffers()]
        if not isinstance(one, nn.Parameter) or one.requires_grad
    }
    frozen = frozen_of(model)
    # A trainer of another library has its own loss, optimizer and options.
    own = task.trainer is not None
    return TaskDescription(
        forms=forms,
        frozen=digest_of(frozen) if frozen else None,
        frozen_bytes=size_of(forms_of(frozen)) if frozen else 0,
        buffers=[name for name, _ in model.named_buffers()],
        loss="" if own else in_words(task.loss),
        optimizer="" if own else _optimizer(task, model),
        metrics=sorted(task.measures) if len(task.train) else [],
        features=list(task.features or ()),
        asks={} if own else _asks(task),
    )


CLIENT_LEARNING: frozenset[Part] = frozenset({"clip_norm", "precision", "unfreeze", "adapter"})
"""Learning options that clients execute, so that all clients must agree on them.

A moving average of the weights is the server's, and each site compiles for itself.
"""


def _asks(task: Task) -> dict[str, str]:
    return {
        part: json.dumps(asked)
        for part, asked in training_options_of(task).items()
        if part in CLIENT_LEARNING
    }


def differences(theirs: TaskDescription, ours: TaskDescription) -> list[str]:
    """Return the differences between a client's task and the server's that prevent training."""
    found = []
    for name, form in ours.forms.items():
        if name not in theirs.forms:
            found.append(f"{name} is missing")
        elif theirs.forms[name] != form:
            found.append(f"{name} is {_form(theirs.forms[name])}, but {_form(form)} at the server")
    found += [f"the server has no {name}" for name in theirs.forms if name not in ours.forms]
    # Different frozen weights are no difference: a site takes over the server's.
    if (theirs.frozen is None) != (ours.frozen is None):
        found.append("the server freezes other parameters")
    for what in ("loss", "optimizer"):
        mine = getattr(theirs, what)
        served = getattr(ours, what)
        # A client with a trainer of its own names none.
        if mine and mine != served:
            found.append(f"the {what} is {mine}, but {served} at the server")
    asked = sorted(theirs.asks.keys() | ours.asks.keys()) if theirs.optimizer else []
    for part in asked:
        mine = theirs.asks.get(part, "not asked for")
        served = ours.asks.get(part, "not asked for")
        if mine != served:
            found.append(f"{part} is {mine}, but {served} at the server")
    if theirs.features and ours.features and theirs.features != ours.features:
        found.append(_features(theirs.features, ours.features))
    return found


def in_words(thing: Any) -> str:
    """Return a function, a partial, or a module in the form of its source."""
    if isinstance(thing, functools.partial):
        settings = [*map(repr, thing.args), *(f"{k}={v!r}" for k, v in thing.keywords.items())]
        return f"{in_words(thing.func)}({', '.join(settings)})"
    if isinstance(thing, nn.Module):
        return " ".join(repr(thing).split())
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def _optimizer(task: Task, model: nn.Module) -> str:
    """Return the optimizer's name and the settings of its groups."""
    with deferred_compiler():
        optimizer = task.optimizer([one for one in model.parameters() if one.requires_grad])
    plain = (bool, int, float, str, tuple, type(None))
    groups = [
        ", ".join(
            f"{name}={value}"
            for name, value in sorted(group.items())
            if name != "params" and isinstance(value, plain) and value not in (None, False)
        )
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(dict.fromkeys(groups))})"


def _form(form: tuple[str, list[int]]) -> str:
    return f"{form[0]} {list(form[1])}"


def _features(theirs: list[str], ours: list[str]) -> str:
    pairs = zip(theirs, ours, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return f"it has {len(theirs)} features, but the server has {len(ours)}"
    return f"feature {place} is {theirs[place]!r}, but {ours[place]!r} at the server"


def machine_of(engine: str, threads: int) -> Machine:
    """Return the properties of this machine that affect the bits of results."""
    return Machine(str(torch.__version__), torch.backends.cpu.get_cpu_capability(), engine, threads)
