"""Interface of aggregation rules: many updates in, one update out.

A rule that *folds* takes updates one after another, in O(1) memory; a rule that *collects* needs
all of them at once. Both are frozen dataclasses with a text form (`dure.settings`), such as
`krum:4` or `clipped:10/mean`.

An update is a list of flat tensors, one per dtype of the model (as `dure.tensors.flat` stores
parameters). A rule treats the list as a *single* vector: distances, norms and medians are of the
whole vector. If the model has floating-point buffers, such as the statistics of batch norm, their
changes follow the weights. Buffers have other units than weights, so distances and norms leave them
out (`UpdateRows.measured`). A rule that collects combines buffers with the coefficients that it has
found for the weights of each client; a rule that works coordinate by coordinate treats buffers
likewise. Next to a rule that folds, buffers take their mean by n_k.

Rules that collect never see an update that is not finite. Such updates are dropped first, and count
among the f broken updates that a rule withstands: with b of n updates dropped, the rule runs on n -
b updates, of which at most max(f - b, 0) are broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dure.arguments import NamedSettings
from dure.errors import TooFewUpdatesError
from dure.federated.aggregate.rows import UpdateRows
from dure.randomness.seeds import RoundSeed
from dure.settings import write

Groups = Callable[[int, RoundSeed], list[list[int]]]
"""(updates, turn) -> row indices of each group; every row is in exactly one group."""


@dataclass(frozen=True)
class Aggregator(NamedSettings):
    """Base class of `Folds` and `Collects`.

    name: the beginning of the text form; a user-defined rule needs none. collects: whether the rule
    needs all updates at once. sums: whether the rule only adds updates up, so that single updates
    need not be formed. wraps: whether the last field, `inner`, is another aggregator.
    """

    collects: ClassVar[bool]
    sums: ClassVar[bool] = False
    wraps: ClassVar[bool] = False

    @classmethod
    def around(cls, inner: Aggregator) -> type[Aggregator]:
        """Return the class that wraps an aggregator like `inner`; for rules with `wraps`."""
        return cls

    def check(self, updates: int) -> None:
        """Raise ValueError if `updates` per round are too few for the guarantee of the rule."""
        if updates < 1:
            raise ValueError(f"{self} needs at least 1 update a round, not {updates}")

    def of_groups(self) -> tuple[Groups, Aggregator] | None:
        """Return (groups, rule for their means) for a server that sees only means of groups.

        Secure aggregation reveals means of groups only. None for a rule that needs single updates.
        """
        return None

    def smallest_group(self, updates: int) -> int:
        """Return the size of the smallest group of `of_groups` among `updates` updates."""
        parted = self.of_groups()
        # Group sizes do not depend on the turn, so any turn will do.
        return updates if parted is None else min(map(len, parted[0](updates, RoundSeed(0, 0))))

    def least_contributors(self, updates: int) -> int:
        """Return the least number of updates that the result of `updates` updates is a mixture of.

        The number is below `updates` for a rule that selects whole updates of some clients. The
        result of a coordinate-wise rule counts as a mixture of all updates.
        """
        return updates

    def __str__(self) -> str:
        """Return the text that `parse` reads: the name and the settings.

        The text of a wrapping rule continues with "/" and the text of the inner rule.
        """
        if self.wraps:
            return f"{write(self, without=('inner',))}/{self.inner}"  # type: ignore[attr-defined]
        return write(self)


@dataclass(frozen=True)
class Folds(Aggregator):
    """Base class of rules that take updates as a stream.

    The caller calls `zero` before the first update, `fold` for each update, and `finish` after the
    last. The rule gets the weights of the model, without buffers.
    """

    collects: ClassVar[bool] = False

    def zero(self, like: Sequence[Tensor]) -> Any:
        """Return an empty accumulator for updates shaped like `like`."""
        raise NotImplementedError

    def fold(self, folded: Any, update: Sequence[Tensor], weight: float) -> Any:
        """Return `folded` with another update of weight n_k; may reuse the memory of `folded`."""
        raise NotImplementedError

    def finish(self, folded: Any) -> list[Tensor]:
        """Return the combined update, possibly in the memory of `folded`.

        Raises TooFewUpdatesError if nothing was folded.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Collects(Aggregator):
    """Base class of rules that take all updates of a round at once."""

    collects: ClassVar[bool] = True

    def combine(
        self, rows: UpdateRows, turn: RoundSeed, state: list[Tensor] | None = None, refused: int = 0
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return (combined update, state for the next round).

        The combined update has the shapes of the inputs and is finite.

        Args:
            rows: the updates, in order of client, and their weights n_k.
            turn: source of random draws, for rules that draw.
            state: the state that the rule returned in the round before; None in the first round.
                Only rules with a state return one.
            refused: number of further updates that the server rejected as invalid. Rejected updates
                count among the f that the rule withstands, like updates that are not finite.

        Raises:
            TooFewUpdatesError: there are too few updates, or none is finite.
        """
        # The guarantee is about all updates that clients sent, including those that are not finite.
        try:
            self.check(len(rows) + refused)
        except ValueError as error:
            raise TooFewUpdatesError(str(error)) from error
        finite = rows.finite()
        if not finite:
            raise TooFewUpdatesError(
                f"{self}: none of the {len(rows)} updates is finite; did training diverge?"
            )
        dropped = len(rows) - len(finite) + refused
        return self.combine_finite(rows.only(finite), dropped, turn, state)

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Apply the rule to finite rows, after `dropped` other updates were dropped."""
        raise NotImplementedError


def still_broken(f: int, dropped: int) -> int:
    """Return how many of the f broken updates may be left after `dropped` updates were dropped."""
    return max(f - dropped, 0)
