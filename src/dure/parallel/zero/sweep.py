"""In which order units are gathered and blocks reduced.

There is one list for all ranks, which each follows at its own pace. Ranks find each other's
messages by nothing but their order, and they need not compute the same: one has no examples today,
another does not use a branch of the model. So every rank issues the messages of a pass in the same
fixed order, each exactly once, whatever it needs itself. A gathering may be issued early
(prefetching); a reduction is issued when the block's gradients are there. A rank may need a unit
whose gathering comes after a reduction for which it is not ready. Then it sends what it has: the
gradients that come afterwards are *late*, and are sent in a second round, of which all ranks learn
from the tail. A backward pass over three units with prefetch 1:

    gather 3 | gather 2 | reduce 3 | gather 1 | reduce 2 | reduce 1

The order is first guessed from the model, and then learned from rank 0's first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One message of a pass.

    number: of the unit that is gathered, or of the block that is reduced.
    """

    kind: Literal["gather", "reduce"]
    number: int


def forward_order(units: Sequence[int]) -> list[Action]:
    """A forward pass: the units in the order in which they are needed."""
    return [Action("gather", unit) for unit in units]


def backward_order(events: Sequence[Action], prefetch: int) -> list[Action]:
    """The messages of a backward pass.

    events: a unit is needed, a block is ready; in order.

    Gatherings are moved ahead, so that `prefetch` of them follow the one that is needed at once.
    """
    gathers = [action for action in events if action.kind == "gather"]
    order: list[Action] = []
    needed = placed = 0
    for action in events:
        if action.kind == "reduce":
            order.append(action)
            continue
        # After the k-th unit that is needed, k + prefetch of them have been placed.
        needed += 1
        while placed < min(len(gathers), needed + prefetch):
            order.append(gathers[placed])
            placed += 1
    return order


def guess(units: Sequence[int], blocks: Sequence[Sequence[int]], around: set[int]) -> list[Action]:
    """The events of a backward pass that no rank has seen.

    Units come in reverse; those around others are gathered first, and their blocks reduced last.

    units: in forward order. blocks: the blocks of each unit that have gradients.
    """
    outer = [unit for unit in units if unit in around]
    inner = [unit for unit in reversed(units) if unit not in around]
    # they are there from first to last
    events = [Action("gather", unit) for unit in outer]
    for unit in inner:
        events.append(Action("gather", unit))
        events += [Action("reduce", block) for block in reversed(blocks[unit])]
    for unit in reversed(outer):
        events += [Action("reduce", block) for block in reversed(blocks[unit])]
    return events


def completed(
    events: Sequence[Action], everything: Sequence[Action], carrier: int | None
) -> list[Action]:
    """The events of a pass, each once, and then what did not happen.

    The block that carries the tail is last.
    """
    seen = list(dict.fromkeys([*events, *everything]))
    last = [
        action
        # No block has the number -1: without a carrier nothing is moved to the end.
        for action in seen
        if action == Action("reduce", carrier if carrier is not None else -1)
    ]
    return [action for action in seen if action not in last] + last


class Sweep:
    """One pass through an order.

    gather, reduce: issue a message. ready: tells whether a block is complete. forced: blocks that
    have left before they were complete. prefetch: units that are gathered ahead of the one that is
    needed.
    """

    def __init__(
        self,
        order: Sequence[Action],
        prefetch: int,
        gather: Callable[[int], None],
        reduce: Callable[[int], None],
        ready: Callable[[int], bool],
    ) -> None:
        self.order = order
        self.prefetch = prefetch
        self._gather = gather
        self._reduce = reduce
        self._ready = ready
        self.position = 0
        self.forced: set[int] = set()
        self._ahead: set[int] = set()
        self._place = {
            action.number: place for place, action in enumerate(order) if action.kind == "gather"
        }

    def has_gathered(self, unit: int) -> bool:
        """Whether the unit's turn in this pass is over, or it has none."""
        # A unit without a turn has place -1, which is before any position.
        return self._place.get(unit, -1) < self.position

    def need(self, unit: int) -> None:
        """Issues everything up to a unit's gathering, and what may go ahead."""
        place = self._place.get(unit, -1)
        while self.position <= place:
            action = self.order[self.position]
            # The order says that this block leaves before the unit is gathered. The others wait for
            # that message, so it leaves with what there is.
            if action.kind == "reduce" and not self._ready(action.number):
                self.forced.add(action.number)
            self._issue(action)
        # It is in use now, and no longer ahead: another one may be.
        self._ahead.discard(unit)
        self.advance()

    def advance(self) -> None:
        """Issues what can be: reductions that are ready, and gatherings within the prefetching."""
        while self.position < len(self.order):
            action = self.order[self.position]
            if action.kind == "gather" and len(self._ahead) >= self.prefetch:
                return
            if action.kind == "reduce":
                # the tail tells of late gradients, so it waits while any block was forced to leave
                tail = self.position == len(self.order) - 1
                if not self._ready(action.number) or (tail and self.forced):
                    return
            self._issue(action)

    def finish(self, before: Callable[[Action], None] = lambda action: None) -> None:
        """Issues the rest. before: called with each action first."""
        while self.position < len(self.order):
            before(self.order[self.position])
            self._issue(self.order[self.position])

    def _issue(self, action: Action) -> None:
        self.position += 1
        if action.kind == "gather":
            self._ahead.add(action.number)
            self._gather(action.number)
        else:
            self._reduce(action.number)
