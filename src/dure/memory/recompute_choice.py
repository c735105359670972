"""Choice of modules to recompute, so that a step fits a memory budget at the least cost.

    every call of a module     stores its activations, is recomputed, or delegates to its children
    memory when call c runs    stored activations of the calls before c and of c, and the gradients
    backward                   of the calls after c: at most the budget, for every c
    cost                       the FLOPs of recomputed calls, to be minimised

The calls are taken in the order of the forward pass. After each call there are several partial
choices, each with its stored bytes and its cost; a partial choice that stores more and costs more
than another is dropped, and so is a choice that exceeds the budget. The cheapest choice at the end
is the result.

This is arithmetic on a single observed pass. Temporaries between two operations, such as the
gradient of an activation, are not included: each choice is tried on tensors without data, and the
budget of the arithmetic is adjusted by the difference until the trial fits.

Source: the dynamic programme is that of Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost", over a tree of modules; the trial without data is dure's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from dure.memory.activations import ModuleCall, observe_call
from dure.memory.peak import step_peak
from dure.memory.recompute_setting import outermost

FLOPS_A_BYTE = 8
"""Cost of writing a byte again, as the FLOPs of a processor in the same time.

Operations that count no FLOPs, such as dropout, are not free.
"""

MOST_WAYS = 400
"""Largest number of partial choices after a call; a front of more is thinned out evenly."""

TRIES = 6
"""Largest number of corrections of the arithmetic by a trial."""


@dataclass(frozen=True)
class RecomputeChoice:
    """Modules to recompute.

    names: of the modules. peak: largest bytes of forward and backward in addition to parameters and
    buffers. extra: FLOPs of recomputation, as a share of the FLOPs of a step without it.
    """

    names: tuple[str, ...]
    peak: int
    extra: float


class _Way(NamedTuple):
    """Partial choice up to a call: stored bytes, cost, recomputed modules as a linked list."""

    kept: int
    cost: float
    again: Any


class _Part(NamedTuple):
    """A call in the arithmetic.

    own: bytes that it stores outside its children. all: bytes with its children. given: bytes of
    inputs that it would store to be recomputed. after: bytes of gradients of later parameters,
    which exist when it runs backward. cost: FLOPs of its recomputation. parts: calls of children.
    may: whether it can be recomputed.
    """

    name: str
    own: int
    all: int
    given: int
    after: int
    cost: float
    parts: tuple[_Part, ...]
    may: bool


class RecomputeChooser:
    """Choice for a model and a batch.

    Args:
        model: The model.
        batch: Inputs and targets.
        loss: Loss of outputs and targets.
        may: Returns whether the module of a name may be recomputed.
        spare: As for `dure.memory.activations.observe_call`, whose errors this class raises.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Any, Any],
        loss: Callable[[Any, Any], Tensor],
        may: Callable[[str], bool] = lambda name: True,
        spare: bool = False,
    ) -> None:
        self._model, self._batch, self._loss, self._spare = model, batch, loss, spare
        self.root = observe_call(model, batch[0], spare)
        self._forward = max(self.root.flops, 1.0)
        self._tree = _Reading(self.root, may).tree
        self._peaks: dict[tuple[str, ...], int] = {}

    def within(self, budget: int) -> RecomputeChoice | None:
        """Return the cheapest choice whose peak is at most `budget` bytes.

        None if there is none.
        """
        nothing = self.of(())
        if nothing.peak <= budget:
            return nothing
        best: RecomputeChoice | None = None
        # Bytes of a trial beyond the arithmetic; a trial without recomputation is a first guess.
        beyond = nothing.peak - _peak_of(self._tree, frozenset())
        for _ in range(TRIES):
            way = _cheapest(self._tree, budget - beyond)
            if way is None:
                break
            choice = self.of(_names(way))
            fits = choice.peak <= budget
            if fits and (best is None or choice.extra < best.extra):
                best = choice
            moved = choice.peak - _peak_of(self._tree, frozenset(choice.names))
            # The same budget would lead to the same choice.
            if moved == beyond:
                break
            beyond = moved if not fits or moved < beyond else beyond
        if best is None:
            least = self.least()
            best = least if least.peak <= budget else None
        return best

    def least(self) -> RecomputeChoice:
        """Return the choice with the smallest peak, at any cost."""
        low, high = 0, max(_peak_of(self._tree, frozenset()), 1)
        # The smallest feasible budget of the arithmetic, to a thousandth.
        while high - low > max(high // 1000, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if _cheapest(self._tree, middle) is None else (low, middle)
        way = _cheapest(self._tree, high)
        tried = [self.of(())] + ([] if way is None else [self.of(_names(way))])
        return min(tried, key=lambda choice: (choice.peak, choice.extra))

    def of(self, names: Sequence[str]) -> RecomputeChoice:
        """Return the choice of these modules, with the peak of its trial."""
        chosen = tuple(names)
        if chosen not in self._peaks:
            self._peaks[chosen] = step_peak(
                self._model, self._batch, self._loss, again=chosen, spare=self._spare
            )
        wanted = frozenset(chosen)
        flops = sum(call.flops for call in self.root.walk() if call.name in wanted)
        return RecomputeChoice(chosen, self._peaks[chosen], flops / (3 * self._forward))


class _Reading:
    """Conversion of observed calls to parts.

    A stored byte counts for the call that first stores it.
    """

    def __init__(self, root: ModuleCall, may: Callable[[str], bool]) -> None:
        self._may = may
        self._kept: set[int] = set()
        self._seen: set[int] = set()
        self._gradients = 0
        self._changing = {call.name for call in root.walk() if call.changes}
        self._total = _gradient_bytes(root.module.parameters())
        self.tree = self._part(root)

    def _part(self, call: ModuleCall) -> _Part:
        given = sum(size for number, size in call.given.items() if number not in self._kept)
        parts = tuple(self._part(child) for child in call.calls)
        own = 0
        for number, size in call.saved.items():
            if number not in self._kept:
                self._kept.add(number)
                own += size
        # Parameters of later modules have gradients when this call runs backward.
        for parameter in call.module.parameters(recurse=False):
            if id(parameter) not in self._seen and parameter.requires_grad:
                self._seen.add(id(parameter))
                self._gradients += parameter.nbytes
        inside = own + sum(part.all for part in parts)
        return _Part(
            name=call.name,
            own=own,
            all=inside,
            given=given,
            after=self._total - self._gradients,
            cost=call.flops + FLOPS_A_BYTE * inside,
            parts=parts,
            # Recomputation of the whole model would not reduce the peak.
            may=bool(call.name) and call.name not in self._changing and self._may(call.name),
        )


def _gradient_bytes(parameters: Iterator[nn.Parameter]) -> int:
    return sum(one.nbytes for one in parameters if one.requires_grad)


def _cheapest(tree: _Part, budget: int) -> _Way | None:
    """Return the cheapest choice for all calls that fits the budget; None if there is none."""
    ways = _through(tree, [_Way(0, 0.0, None)], budget)
    return min(ways, key=lambda way: way.cost, default=None)


def _through(part: _Part, ways: list[_Way], budget: int) -> list[_Way]:
    """Return the partial choices after a call, given the partial choices before it."""
    found: list[_Way] = []
    if part.may:
        for way in ways:
            kept = way.kept + part.given
            # During the recomputation its own activations are stored as well.
            if kept + part.all + part.after <= budget and part.all > part.given:
                found.append(_Way(kept, way.cost + part.cost, (part.name, way.again)))
    kept_here = [way._replace(kept=way.kept + part.own) for way in ways]
    for child in part.parts:
        kept_here = _through(child, kept_here, budget)
    found += [way for way in kept_here if way.kept + part.after <= budget]
    return _thinned(found)


def _thinned(ways: list[_Way]) -> list[_Way]:
    """Return the Pareto front of stored bytes and cost, thinned out to `MOST_WAYS`."""
    front: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.kept, way.cost)):
        if not front or way.cost < front[-1].cost:
            front.append(way)
    if len(front) <= MOST_WAYS:
        return front
    # The first stores the least, the last costs the least: both stay.
    step = (len(front) - 1) / (MOST_WAYS - 1)
    return [front[round(number * step)] for number in range(MOST_WAYS)]


def _names(way: _Way) -> tuple[str, ...]:
    """Return the recomputed modules of a choice, in the order of the forward pass, each once."""
    found: list[str] = []
    link = way.again
    while link is not None:
        name, link = link
        found.append(name)
    # A module with several calls may have been chosen in one call, and its parent in another.
    return outermost(dict.fromkeys(reversed(found)))


def _peak_of(tree: _Part, again: frozenset[str]) -> int:
    """Return the peak of a choice in the arithmetic, in bytes."""
    return _walked(tree, 0, again)[1]


def _walked(part: _Part, kept: int, again: frozenset[str]) -> tuple[int, int]:
    """Return (bytes stored after a call, peak bytes in it)."""
    if part.name in again and part.may:
        kept += part.given
        return kept, kept + part.all + part.after
    kept += part.own
    peak = 0
    for child in part.parts:
        kept, inside = _walked(child, kept, again)
        peak = max(peak, inside)
    return kept, max(peak, kept + part.after)
