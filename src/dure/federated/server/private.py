"""What a server asks of differential privacy of clients (`dure.federated.privacy.user_level`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Private(Protocol):
    """It gathers a round's contributions in place of the rule, and releases them with noise.

    expected: q·W, by which sums were divided. repeats: whether coins and noise follow from a seed.
    """

    @property
    def repeats(self) -> bool:
        """As above."""

    @property
    def expected(self) -> float:
        """As above."""

    def asks(self, number: int, clients: Sequence[int]) -> None:
        """Round `number` has these clients, who are asked next."""

    def fold(self, contribution: Sequence[Tensor], examples: int) -> None:
        """Takes all that a client says, as real numbers, and of how many examples it is."""

    def add(self, total: Sequence[Tensor]) -> None:
        """Takes the sum of contributions that clients have clipped and weighed themselves."""

    def forget(self) -> None:
        """Forgets what was folded."""

    def release(self, number: int) -> list[Tensor]:
        """The noised mean of round `number`, shaped as a contribution; paid for before."""

    def numbers(self) -> dict[str, float]:
        """What the history tells of the newest round, such as epsilon."""

    def exhausted(self) -> str | None:
        """ "epsilon" where another round would tell more than may be told."""

    def facts(self) -> dict[str, Any]:
        """What is promised, for the report."""

    def state(self) -> Any:
        """What it needs to go on, as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`; what was spent since is not forgotten."""

    def close(self) -> None:
        """The run has ended."""


class Account(Protocol):
    """The account of what clients that train by DP-SGD tell of their examples."""

    def asked(self, clients: Iterable[int]) -> None:
        """Each of these has trained once more, as far as is known."""

    def numbers(self) -> dict[str, float]:
        """What the history tells, such as epsilon."""

    def facts(self) -> dict[str, Any]:
        """What is promised, for the report."""

    def state(self) -> Any:
        """What it needs to go on, as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`."""
