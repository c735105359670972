"""What differential privacy promises, in words: an epsilon says nothing without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dure.privacy.accountant import Relation

Sampling = Literal["coins", "all"]
"""How units come into a release: each by its own coin, or all into all (no amplification)."""


@dataclass(frozen=True)
class Promise:
    """To whom something is promised, and against whom.

    unit: of whom any one may be in the data or not: "client", "example". delta: the probability
    that epsilon does not hold. relation: in what neighbouring data sets differ. sampling: how units
    come into a release. against: who may look at all that was released. differ: in words, in what
    neighbouring data sets differ, where that is said more exactly.
    """

    unit: str
    delta: float
    relation: Relation = "add-or-remove"
    sampling: Sampling = "coins"
    against: str = "whoever sees all models of the run"
    differ: str | None = None

    @property
    def neighbours(self) -> str:
        """The neighbouring relation in words."""
        if self.differ is not None:
            return self.differ
        if self.relation == "replace":
            return f"one {self.unit} replaced by another"
        return f"one {self.unit} more or less"

    @property
    def assumption(self) -> str:
        """The sampling assumption in words."""
        if self.sampling == "all":
            return f"any {self.unit} may be in every release (no amplification by sampling)"
        return (
            f"each {self.unit} is in a release by a coin of its own, with the same probability, "
            f"and nobody learns how it fell"
        )

    def said(self, epsilon: float | None) -> str:
        """All of it, in one sentence. epsilon: None is no bound."""
        if epsilon is None:
            return f"no differential privacy of any {self.unit}: without noise there is no bound"
        return (
            f"({epsilon:.4g}, {self.delta:g})-differential privacy of any {self.unit} against "
            f"{self.against}; neighbouring data: {self.neighbours}; sampling: {self.assumption}"
        )

    def facts(self, epsilon: float | None) -> dict[str, Any]:
        """For summary.json and the report."""
        return {
            "epsilon": epsilon,
            "delta": self.delta,
            "unit": self.unit,
            "neighbours": self.neighbours,
            "sampling": self.assumption,
            "against": self.against,
            "said": self.said(epsilon),
        }
