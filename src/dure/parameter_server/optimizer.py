"""Optimizer at the servers: the task's own optimizer, over the keys of a shard.

An elementwise optimizer gives the same bits on a model's parameters and on pieces of them, so a
shard has the task's optimizer over its own keys:

    gradient g, keys w of the shard       w <- w - step(factor · lr, g)       by that optimizer

Its state, such as momentum, stays with the shard. Neighbouring parameters with equal settings form
a piece. SGD with momentum, Adam, AdamW, Adagrad, RMSprop and the others in `ELEMENTWISE` are
elementwise; optimizers that need a whole parameter (LBFGS, Muon) raise an error. So does an
optimizer with features beyond its class and settings, such as hooks, which would be lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.parameter_server.adagrad import DownpourAdagrad

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RAdam,
    DownpourAdagrad,
)


@dataclass(frozen=True)
class ParameterSpan:
    """Neighbouring keys start … stop-1 of a vector, with the number of their parameter group."""

    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class OptimizerRecipe:
    """Recipe for an optimizer over any keys.

    Args:
        kind: class of the optimizer.
        groups: settings of each parameter group.
        spans: spans by vector, in order; keys without a group are in no span.
        seams: keys at which pieces must begin, since some workers push only one side.
        arguments: constructor arguments, of which some affect only the first state.
    """

    kind: type[Optimizer]
    groups: Sequence[Mapping[str, Any]]
    spans: Sequence[Sequence[ParameterSpan]]
    seams: frozenset[tuple[int, int]] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: Optimizer, vectors: Sequence[Sequence[nn.Parameter]]) -> OptimizerRecipe:
        """Return the recipe of an optimizer over parameters that form these vectors.

        Raises ValueError for an optimizer that is not elementwise, that has made steps, or that has
        hooks.
        """
        kind = type(optimizer)
        if kind not in ELEMENTWISE:
            names = ", ".join(one.__name__ for one in ELEMENTWISE)
            raise ValueError(
                f"dure does not know whether {kind.__name__} updates every element independently, "
                f"so servers cannot divide it: choose {names}"
            )
        number_of: dict[int, int] = {}
        groups: list[Mapping[str, Any]] = []
        for number, group in enumerate(optimizer.param_groups):
            number_of.update((id(parameter), number) for parameter in group["params"])
            settings = {name: value for name, value in group.items() if name != "params"}
            for name, value in settings.items():
                if isinstance(value, Tensor):
                    raise ValueError(
                        f"{kind.__name__}({name}=...) has to be a number, not a tensor"
                    )
            groups.append(settings)
        spans = [_spans(vector, number_of) for vector in vectors]
        return cls(kind, groups, spans, arguments=arguments_of(optimizer))

    def make(self, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Return a new optimizer of these parameter groups."""
        return self.kind(groups, **self.arguments)  # type: ignore[arg-type]

    def pieces(self, vector: int, start: int, stop: int) -> list[ParameterSpan]:
        """Return the keys start … stop-1 of a vector, cut at changes of settings and at seams."""
        cuts = sorted(key for v, key in self.seams if v == vector and start < key < stop)
        pieces = []
        for span in self.spans[vector]:
            inner = [cut for cut in cuts if span.start < cut < span.stop]
            bounds = [span.start, *inner, span.stop]
            for begin, end in pairwise(bounds):
                if max(begin, start) < min(end, stop):
                    pieces.append(ParameterSpan(max(begin, start), min(end, stop), span.group))
        return pieces

    @property
    def linear(self) -> bool:
        """Whether a step is linear in the gradient."""
        return self.kind is torch.optim.SGD

    @property
    def plain(self) -> bool:
        """Whether a step is just w <- w - lr·g, which a worker can make as well."""
        return self.linear and not any(
            group[name]
            for group in self.groups
            for name in ("momentum", "weight_decay", "maximize")
        )


def arguments_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer's constructor, by argument."""
    named = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in named}


def check_new(optimizer: Optimizer) -> None:
    """Check that an optimizer is new and has no hooks; raises ValueError if not."""
    kind = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            f"{kind} has hooks for its steps, which servers do not call: leave them out (a "
            f"schedule of learning rates is an lr_schedule)"
        )
    if not all(_is_first(optimizer, group) for group in optimizer.param_groups):
        raise ValueError(
            f"{kind} has made steps or loaded a state, but servers start without it: give a new one"
        )


def _is_first(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a group have the first state of their optimizer."""
    kind: Any = type(optimizer)
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state:
            # A parameter of one element suffices, since all elements begin with equal state.
            sample = nn.Parameter(torch.zeros(1, dtype=parameter.dtype))
            known = kind([{**group, "params": [sample]}], **arguments_of(optimizer)).state[sample]
            if not _same(state, known):
                return False
    return True


def _same(state: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether every element of a state has the known value."""
    return state.keys() == known.keys() and all(
        value.is_meta or torch.equal(value, known[name].to(value).expand_as(value))
        if isinstance(value, Tensor)
        else value == known[name]
        for name, value in state.items()
    )


def _spans(vector: Sequence[nn.Parameter], number_of: Mapping[int, int]) -> list[ParameterSpan]:
    spans: list[ParameterSpan] = []
    start = 0
    for parameter in vector:
        stop = start + parameter.numel()
        group = number_of.get(id(parameter))
        if group is not None and start < stop:
            if spans and spans[-1].stop == start and spans[-1].group == group:
                spans[-1] = ParameterSpan(spans[-1].start, stop, group)
            else:
                spans.append(ParameterSpan(start, stop, group))
        start = stop
    return spans


def _coupled_decay(group: Mapping[str, Any]) -> float:
    """Return the weight decay that the optimizer adds to the gradient; SGD does, AdamW does not."""
    decay: float = group.get("weight_decay", 0.0)
    return 0.0 if group.get("decoupled_weight_decay") else decay


class ShardOptimizer:
    """Optimizer of a vector's keys from `start` on; changes their values in place."""

    def __init__(self, recipe: OptimizerRecipe, vector: int, start: int, values: Tensor) -> None:
        self.start = start
        self.plain = recipe.plain
        self.settings = recipe.groups
        spans = recipe.pieces(vector, start, start + len(values))
        self.spans = spans
        self.pieces = [
            nn.Parameter(values[span.start - start : span.stop - start], requires_grad=False)
            for span in spans
        ]
        groups = [
            {
                **settings,
                "params": [
                    piece
                    for piece, span in zip(self.pieces, spans, strict=True)
                    if span.group == number
                ],
            }
            for number, settings in enumerate(recipe.groups)
        ]
        # Some optimizers reject an empty parameter group.
        groups = [group for group in groups if group["params"]]
        self.optimizer = recipe.make(groups) if groups else None
        self.rates = [group["lr"] for group in groups]
        self.decays = [_coupled_decay(group) for group in groups]

    def check_range(self, start: int, stop: int) -> None:
        """Check that start … stop-1 consists of whole pieces; raises ValueError if not."""
        for span in self.spans:
            if span.start < start < span.stop or span.start < stop < span.stop:
                raise ValueError(
                    f"the keys {start} to {stop - 1} end inside the keys {span.start} to "
                    f"{span.stop - 1}, which the optimizer keeps in one piece"
                )

    @torch.no_grad()
    def step(self, start: int, gradient: Tensor, factor: float, decay: float = 1.0) -> None:
        """Make a step on the keys from `start` on.

        `factor` multiplies the learning rates, `decay` a weight decay that is part of the gradient.
        """
        if self.optimizer is None:
            return
        stop = start + len(gradient)
        inside = [start <= span.start and span.stop <= stop for span in self.spans]
        if self.plain:
            # The optimizer's arithmetic without its overhead, which exceeds a small step.
            for piece, span, is_inside in zip(self.pieces, self.spans, inside, strict=True):
                if is_inside:
                    own = gradient[span.start - start : span.stop - start]
                    piece.add_(own, alpha=-self.settings[span.group]["lr"] * factor)
            return
        for piece, span, is_inside in zip(self.pieces, self.spans, inside, strict=True):
            piece.grad = gradient[span.start - start : span.stop - start] if is_inside else None
        for group, rate, coupled in zip(
            self.optimizer.param_groups, self.rates, self.decays, strict=True
        ):
            group["lr"] = rate * factor
            if coupled:
                group["weight_decay"] = coupled * decay
        self.optimizer.step()
        for piece in self.pieces:
            piece.grad = None

    def state(self) -> dict[str, Any]:
        """Return the state by the number of the piece; tensors are shared, not copied."""
        if self.optimizer is None:
            return {}
        return {
            str(number): dict(self.optimizer.state[piece])
            for number, piece in enumerate(self.pieces)
            if self.optimizer.state.get(piece)
        }

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore copies of the states in `state`."""
        if self.optimizer is None:
            return
        for number, kept in state.items():
            self.optimizer.state[self.pieces[int(number)]] = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in kept.items()
            }
