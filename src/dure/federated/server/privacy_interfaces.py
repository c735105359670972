"""Interfaces between the server and differential privacy (`dure.federated.privacy.user_level`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor


class PrivateAggregation(Protocol):
    """User-level privacy: gathers a round's contributions, and releases their noised mean.

    expected: q·W, the denominator of the sums. repeats: whether sampling and noise follow from a
    seed.
    """

    @property
    def repeats(self) -> bool:
        """Whether sampling and noise follow from a seed."""

    @property
    def expected(self) -> float:
        """Denominator q·W of the sums."""

    def asks(self, number: int, clients: Sequence[int]) -> None:
        """Note the clients of round `number`, before they are asked."""

    def fold(self, contribution: Sequence[Tensor], examples: int) -> None:
        """Take a client's contribution, as real tensors, with its number of examples."""

    def add(self, total: Sequence[Tensor]) -> None:
        """Take the sum of contributions that clients have clipped and weighed themselves."""

    def forget(self) -> None:
        """Discard the folded contributions."""

    def release(self, number: int) -> list[Tensor]:
        """Return the noised mean of round `number`, shaped as a contribution; charged before."""

    def numbers(self) -> dict[str, float]:
        """Return numbers for the history of the newest round, such as epsilon."""

    def exhausted(self) -> str | None:
        """Return "epsilon" if another round would exceed the privacy budget; else None."""

    def facts(self) -> dict[str, Any]:
        """Return the privacy guarantees, for the report."""

    def state(self) -> Any:
        """Return the state, as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """Restore the result of `state`; spending since then stays counted."""

    def close(self) -> None:
        """End the run."""


class ExamplePrivacyAccount(Protocol):
    """Privacy account of the examples of clients that train by DP-SGD."""

    def asked(self, clients: Iterable[int]) -> None:
        """Count a further training of each of these clients, as far as known."""

    def numbers(self) -> dict[str, float]:
        """Return numbers for the history, such as epsilon."""

    def facts(self) -> dict[str, Any]:
        """Return the privacy guarantees, for the report."""

    def state(self) -> Any:
        """Return the state, as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """Restore the result of `state`."""
