"""Which modules are computed again, so that a step's memory fits a budget at the least cost.

    every call of a module     keeps what it keeps, or is computed again, or its children decide
    memory when call c goes    what the calls before c have kept, what c keeps, and the gradients of
    backward                   those after it: at most the budget, for every c
    cost                       the FLOPs of what is computed twice, as few as possible

The calls are taken in the order of the forward pass. After each there are several ways to have
come there, each with what is kept and what it costs; a way that keeps more and costs more than
another leads nowhere and is dropped, and so is one that does not fit. What is left at the end is
the cheapest.

That much is arithmetic on one observed pass. What lies between two operations, such as the gradient
of an activation, is not in it: each choice is tried, on tensors without data, and the budget of the
arithmetic is moved by the difference until the trial fits.

Source: the dynamic programme is that of Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost", over a tree of modules; trying it without data is dure's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from dure.memory.activations import Call, observed
from dure.memory.peak import step_peak
from dure.memory.recompute import outermost

FLOPS_A_BYTE = 8
"""What it costs to write a byte once more: as many FLOPs as a processor does meanwhile.

Operations that count no FLOPs, such as dropout, are not free.
"""

MOST_WAYS = 400
"""Ways that are kept after a call: neighbours that differ by less than this part are alike."""

TRIES = 6
"""How often the arithmetic is corrected by a trial."""


@dataclass(frozen=True)
class Choice:
    """What is computed again.

    names: of the modules. peak: bytes that forward and backward take at most beside parameters and
    buffers. extra: FLOPs of what is computed again, over those of the step without it.
    """

    names: tuple[str, ...]
    peak: int
    extra: float


class _Way(NamedTuple):
    """How one may have come to a call: what is kept so far, what it costs, and who is computed
    again, as a chain of pairs.
    """

    kept: int
    cost: float
    again: Any


class _Part(NamedTuple):
    """A call, as the arithmetic sees it.

    own: bytes that it keeps outside of its children; all: with them; given: that it would keep to
    be computed again. before: gradients of parameters that were not reached when it goes backward.
    """

    name: str
    own: int
    all: int
    given: int
    after: int
    cost: float
    parts: tuple[_Part, ...]
    may: bool


class Chooser:
    """Chooses for one model and one batch.

    batch: inputs and targets. loss: of outputs and targets. may: whether a module of this name may
    be computed again. spare: as for `dure.memory.activations.observed`, whose errors it raises.
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
        self.root = observed(model, batch[0], spare)
        self._forward = max(self.root.flops, 1.0)
        self._tree = _Reading(self.root, may).tree
        self._peaks: dict[tuple[str, ...], int] = {}

    def within(self, budget: int) -> Choice | None:
        """The cheapest choice whose peak is at most the budget; None where there is none."""
        nothing = self.of(())
        if nothing.peak <= budget:
            return nothing
        best: Choice | None = None
        # What a trial takes beyond the arithmetic; that of keeping everything is a first guess.
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

    def least(self) -> Choice:
        """The choice that takes the least memory, whatever it costs."""
        low, high = 0, max(_peak_of(self._tree, frozenset()), 1)
        # The least budget of the arithmetic, to a thousandth.
        while high - low > max(high // 1000, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if _cheapest(self._tree, middle) is None else (low, middle)
        way = _cheapest(self._tree, high)
        tried = [self.of(())] + ([] if way is None else [self.of(_names(way))])
        return min(tried, key=lambda choice: (choice.peak, choice.extra))

    def of(self, names: Sequence[str]) -> Choice:
        """The choice of these modules, as it is when it is tried."""
        chosen = tuple(names)
        if chosen not in self._peaks:
            self._peaks[chosen] = step_peak(
                self._model, self._batch, self._loss, again=chosen, spare=self._spare
            )
        wanted = frozenset(chosen)
        flops = sum(call.flops for call in self.root.walk() if call.name in wanted)
        return Choice(chosen, self._peaks[chosen], flops / (3 * self._forward))


class _Reading:
    """Makes parts of observed calls; a byte that is kept is one of the call that keeps it first."""

    def __init__(self, root: Call, may: Callable[[str], bool]) -> None:
        self._may = may
        self._kept: set[int] = set()
        self._seen: set[int] = set()
        self._gradients = 0
        self._changing = {call.name for call in root.walk() if call.changes}
        self._total = _gradient_bytes(root.module.parameters())
        self.tree = self._part(root)

    def _part(self, call: Call) -> _Part:
        given = sum(size for number, size in call.given.items() if number not in self._kept)
        parts = tuple(self._part(child) for child in call.calls)
        own = 0
        for number, size in call.saved.items():
            if number not in self._kept:
                self._kept.add(number)
                own += size
        # Those of modules that come later, whose gradients are there when this one goes backward.
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
            # The model itself would be computed twice, and nothing would be gained.
            may=bool(call.name) and call.name not in self._changing and self._may(call.name),
        )


def _gradient_bytes(parameters: Iterator[nn.Parameter]) -> int:
    return sum(one.nbytes for one in parameters if one.requires_grad)


def _cheapest(tree: _Part, budget: int) -> _Way | None:
    """The cheapest way through the calls that fits everywhere; None where there is none."""
    ways = _through(tree, [_Way(0, 0.0, None)], budget)
    return min(ways, key=lambda way: way.cost, default=None)


def _through(part: _Part, ways: list[_Way], budget: int) -> list[_Way]:
    """The ways after a call, for those before it."""
    found: list[_Way] = []
    if part.may:
        for way in ways:
            kept = way.kept + part.given
            # When it is computed again, what it keeps is there as well, and what came before it.
            if kept + part.all + part.after <= budget and part.all > part.given:
                found.append(_Way(kept, way.cost + part.cost, (part.name, way.again)))
    kept_here = [way._replace(kept=way.kept + part.own) for way in ways]
    for child in part.parts:
        kept_here = _through(child, kept_here, budget)
    found += [way for way in kept_here if way.kept + part.after <= budget]
    return _thinned(found)


def _thinned(ways: list[_Way]) -> list[_Way]:
    """Without those that keep more and cost no less than another, and at most `MOST_WAYS`."""
    front: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.kept, way.cost)):
        if not front or way.cost < front[-1].cost:
            front.append(way)
    if len(front) <= MOST_WAYS:
        return front
    # The first keeps least, the last costs least: both stay.
    step = (len(front) - 1) / (MOST_WAYS - 1)
    return [front[round(number * step)] for number in range(MOST_WAYS)]


def _names(way: _Way) -> tuple[str, ...]:
    """The modules that a way computes again, in the order of the forward pass, each once."""
    found: list[str] = []
    link = way.again
    while link is not None:
        name, link = link
        found.append(name)
    # A module that is called in several places may have been chosen in one, and its parent in
    # another.
    return outermost(dict.fromkeys(reversed(found)))


def _peak_of(tree: _Part, again: frozenset[str]) -> int:
    """The arithmetic's peak of a choice."""
    return _walked(tree, 0, again)[1]


def _walked(part: _Part, kept: int, again: frozenset[str]) -> tuple[int, int]:
    """(what is kept after a call, the peak in it)."""
    if part.name in again and part.may:
        kept += part.given
        return kept, kept + part.all + part.after
    kept += part.own
    peak = 0
    for child in part.parts:
        kept, inside = _walked(child, kept, again)
        peak = max(peak, inside)
    return kept, max(peak, kept + part.after)
