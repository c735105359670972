"""Order in which units are gathered and blocks reduced.

All ranks follow the same list, each at its own pace. Ranks match messages only by their order, and
may compute different things: a rank may have no examples, or not use a branch of the model. Every
rank therefore issues the messages of a pass in the same fixed order, each exactly once, whatever
the rank needs itself. A gather may be issued early (prefetching); a reduction is issued when the
block's gradients are complete. A rank may need a unit whose gather comes after a reduction for
which the rank is not ready. The rank then sends the gradients that it has: the gradients that come
afterwards are *late*, and are sent in a second round, of which all ranks learn from the trailer. A
backward pass over three units with prefetch 1:

    gather 3 | gather 2 | reduce 3 | gather 1 | reduce 2 | reduce 1

The order is first guessed from the model, and then learned from rank 0's first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class GatherAction(NamedTuple):
    """Message of a pass.

    number: of the unit that is gathered, or of the block that is reduced.
    """

    kind: Literal["gather", "reduce"]
    number: int


def forward_order(units: Sequence[int]) -> list[GatherAction]:
    """Return the messages of a forward pass: units in the order in which they are needed."""
    return [GatherAction("gather", unit) for unit in units]


def backward_order(events: Sequence[GatherAction], prefetch: int) -> list[GatherAction]:
    """Return the messages of a backward pass.

    events: needs of units and completions of blocks, in order. Gathers are moved ahead, so that
    `prefetch` gathers follow the gather that is needed at once.
    """
    gathers = [action for action in events if action.kind == "gather"]
    order: list[GatherAction] = []
    needed = placed = 0
    for action in events:
        if action.kind == "reduce":
            order.append(action)
            continue
        # After the k-th needed unit, k + prefetch gathers have been placed.
        needed += 1
        while placed < min(len(gathers), needed + prefetch):
            order.append(gathers[placed])
            placed += 1
    return order


def guessed_events(
    units: Sequence[int], blocks: Sequence[Sequence[int]], around: set[int]
) -> list[GatherAction]:
    """Return the probable events of a backward pass that no rank has observed.

    Units come in reverse; units around others are gathered first, and their blocks reduced last.

    units: in forward order. blocks: the blocks of each unit that have gradients. around: units that
    contain other units.
    """
    outer = [unit for unit in units if unit in around]
    inner = [unit for unit in reversed(units) if unit not in around]
    # outer units are available during the whole pass
    events = [GatherAction("gather", unit) for unit in outer]
    for unit in inner:
        events.append(GatherAction("gather", unit))
        events += [GatherAction("reduce", block) for block in reversed(blocks[unit])]
    for unit in reversed(outer):
        events += [GatherAction("reduce", block) for block in reversed(blocks[unit])]
    return events


def completed_events(
    events: Sequence[GatherAction], everything: Sequence[GatherAction], carrier: int | None
) -> list[GatherAction]:
    """Return the events of a pass, each once, followed by the events that did not happen.

    The block that carries the trailer is last.
    """
    seen = list(dict.fromkeys([*events, *everything]))
    last = [
        action
        # No block has the number -1: without a carrier nothing is moved to the end.
        for action in seen
        if action == GatherAction("reduce", carrier if carrier is not None else -1)
    ]
    return [action for action in seen if action not in last] + last


class GatherSweep:
    """Pass through an order of messages.

    Args:
        order: Messages of the pass.
        prefetch: Units that are gathered ahead of the unit that is needed.
        gather: Issues the gather of a unit.
        reduce: Issues the reduction of a block.
        ready: Returns whether a block is complete.

    Attributes:
        position: Index of the next message.
        forced: Blocks that were sent before they were complete.
    """

    def __init__(
        self,
        order: Sequence[GatherAction],
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
        """Return whether a unit's gather has been issued in this pass, or the order has none."""
        # A unit that the order does not have is at place -1, which is before any position.
        return self._place.get(unit, -1) < self.position

    def need(self, unit: int) -> None:
        """Issue all messages up to the gather of a unit, and the messages that may go ahead."""
        place = self._place.get(unit, -1)
        while self.position <= place:
            action = self.order[self.position]
            # In the order this block is reduced before the unit is gathered. The other ranks wait
            # for that message, so the block is sent with its available gradients.
            if action.kind == "reduce" and not self._ready(action.number):
                self.forced.add(action.number)
            self._issue(action)
        # The unit is in use now and no longer ahead: another unit may be gathered ahead.
        self._ahead.discard(unit)
        self.advance()

    def advance(self) -> None:
        """Issue the next messages: ready reductions, and gathers within the prefetch limit."""
        while self.position < len(self.order):
            action = self.order[self.position]
            if action.kind == "gather" and len(self._ahead) >= self.prefetch:
                return
            if action.kind == "reduce":
                # the trailer reports late gradients, so it waits if any block was sent incomplete
                tail = self.position == len(self.order) - 1
                if not self._ready(action.number) or (tail and self.forced):
                    return
            self._issue(action)

    def finish(self, before: Callable[[GatherAction], None] = lambda action: None) -> None:
        """Issue the remaining messages. before: called with each action first."""
        while self.position < len(self.order):
            before(self.order[self.position])
            self._issue(self.order[self.position])

    def _issue(self, action: GatherAction) -> None:
        self.position += 1
        if action.kind == "gather":
            self._ahead.add(action.number)
            self._gather(action.number)
        else:
            self._reduce(action.number)
