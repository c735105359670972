"""What an aggregator is: updates in, one update out.

One that *folds* takes them one after another, in O(1) memory; one that *collects* needs them all.
Both are frozen dataclasses with a text form (`dure.settings`), such as `krum:4` or
`clipped:10/mean`.

An update is a list of flat tensors, one a dtype of the model (as `dure.tensors.flat` keeps
parameters). A rule sees them as *one* vector: distances, norms and medians are of the whole. Where
the model has floating-point buffers, such as the statistics of batch norm, their changes follow.
They have other units than weights, so distances and norms leave them out (`Rows.measured`): a rule
that collects combines them as it has found for the weights of each client, coordinate by coordinate
if it is such a rule; beside one that folds, they have their mean by n_k.

Rules that collect never see an update that is not finite. Such updates are dropped first, and count
among the f that a rule withstands: with b of n dropped it goes on with n - b updates, of which at
most max(f - b, 0) are broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dure.arguments import Told
from dure.errors import TooFewUpdatesError
from dure.federated.aggregate.rows import Rows
from dure.randomness.turn import Turn
from dure.settings import write

Groups = Callable[[int, Turn], list[list[int]]]
"""(updates, turn) -> the places of each group's, all of them once."""


@dataclass(frozen=True)
class Aggregator(Told):
    """What all have in common.

    name: what its text begins with; one of a user's own needs none. collects: whether it needs all
    updates at once. sums: whether it does nothing with them but add them up, so that they need not
    be formed one by one. wraps: whether its last field, `inner`, is another aggregator.
    """

    name: ClassVar[str]
    collects: ClassVar[bool]
    sums: ClassVar[bool] = False
    wraps: ClassVar[bool] = False

    @classmethod
    def around(cls, inner: Aggregator) -> type[Aggregator]:
        """The class that wraps an aggregator like `inner`, for one that wraps."""
        return cls

    def check(self, updates: int) -> None:
        """Raises ValueError if `updates` a round are too few for what the aggregator promises."""
        if updates < 1:
            raise ValueError(f"{self} needs at least 1 update a round, not {updates}")

    def of_groups(self) -> tuple[Groups, Aggregator] | None:
        """How the rule is followed where only means of groups are seen, as under secure
        aggregation: the groups, and the rule for their means. None where it needs single updates.
        """
        return None

    def smallest_group(self, updates: int) -> int:
        """The fewest updates of one of `of_groups`, of so many."""
        parted = self.of_groups()
        # How large groups are does not depend on who is in them.
        return updates if parted is None else min(map(len, parted[0](updates, Turn(0, 0))))

    def handed_on(self, updates: int) -> int:
        """Of how many updates the result is a mixture, at least, where so many are combined.

        Fewer than all where a rule chooses some clients' whole updates. One that compares all of
        them coordinate by coordinate is a mixture of all.
        """
        return updates

    def __str__(self) -> str:
        """The text that `parse` reads: the name and the settings.

        For one that wraps, then "/" and the inner one.
        """
        if self.wraps:
            return f"{write(self, without=('inner',))}/{self.inner}"  # type: ignore[attr-defined]
        return write(self)


@dataclass(frozen=True)
class Folds(Aggregator):
    """Takes updates as a stream.

    `zero` before the first, `fold` for each, `finish` after the last. It gets the weights alone.
    """

    collects: ClassVar[bool] = False

    def zero(self, like: Sequence[Tensor]) -> Any:
        """Nothing folded yet, for updates shaped like `like`."""
        raise NotImplementedError

    def fold(self, folded: Any, update: Sequence[Tensor], weight: float) -> Any:
        """`folded` with one update more, of weight n_k. The memory of `folded` is used again."""
        raise NotImplementedError

    def finish(self, folded: Any) -> list[Tensor]:
        """The combined update, maybe in the memory of `folded`.

        Raises TooFewUpdatesError if nothing was folded.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Collects(Aggregator):
    """Takes all updates of a round at once."""

    collects: ClassVar[bool] = True

    def combine(
        self, rows: Rows, turn: Turn, state: list[Tensor] | None = None, refused: int = 0
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """(the combined update, shaped as each of them and finite; the state for the next round).

        rows: the updates, in order of client, and their weights n_k. turn: for rules that draw.
        state: what the rule itself returned in the round before, None in the first; only rules that
            need it return one.
        refused: how many other updates were sent that are no rows, as they could not be right. They
            count among the f that the rule withstands, as those that are not finite do.

        Raises TooFewUpdatesError if there are too few updates, or if none is finite.
        """
        # The promise is about all that were sent, those that are not finite among them.
        try:
            self.check(len(rows) + refused)
        except ValueError as error:
            raise TooFewUpdatesError(str(error)) from error
        finite = rows.finite()
        if not finite:
            raise TooFewUpdatesError(
                f"{self}: of {len(rows)} updates none is finite; did training diverge?"
            )
        dropped = len(rows) - len(finite) + refused
        return self.combine_finite(rows.only(finite), dropped, turn, state)

    def combine_finite(
        self, rows: Rows, dropped: int, turn: Turn, state: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """`combine` for finite rows, after `dropped` others were dropped: the rule itself."""
        raise NotImplementedError


def still_broken(f: int, dropped: int) -> int:
    """How many of the f broken updates may be left, once `dropped` updates were dropped."""
    return max(f - dropped, 0)
