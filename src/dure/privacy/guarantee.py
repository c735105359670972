"""Statement of a differential privacy guarantee: the terms without which epsilon means nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dure.privacy.accountant import Relation

Sampling = Literal["coins", "all"]
"""Participation of units in a release: sampled independently, or all (no amplification)."""


@dataclass(frozen=True)
class PrivacyGuarantee:
    """Terms of a guarantee.

    Args:
        unit: the protected unit, which may be in the data or not: "client", "example".
        delta: the probability that epsilon does not hold.
        relation: difference of neighbouring data sets.
        sampling: participation of units in a release.
        against: the observers against whom the guarantee holds.
        differ: difference of neighbouring data sets in words, if more exact than `relation`.
    """

    unit: str
    delta: float
    relation: Relation = "add-or-remove"
    sampling: Sampling = "coins"
    against: str = "whoever sees all models of the run"
    differ: str | None = None

    @property
    def neighbours(self) -> str:
        """Neighbouring relation in words."""
        if self.differ is not None:
            return self.differ
        if self.relation == "replace":
            return f"one {self.unit} replaced by another"
        return f"one {self.unit} more or less"

    @property
    def assumption(self) -> str:
        """Sampling assumption in words."""
        if self.sampling == "all":
            return f"any {self.unit} may be in every release (no amplification by sampling)"
        return (
            f"each {self.unit} is in a release by a coin of its own, with the same probability, "
            f"and nobody learns how it fell"
        )

    def said(self, epsilon: float | None) -> str:
        """Return the guarantee as a sentence. epsilon: None for no bound."""
        if epsilon is None:
            return f"no differential privacy of any {self.unit}: without noise there is no bound"
        return (
            f"({epsilon:.4g}, {self.delta:g})-differential privacy of any {self.unit} against "
            f"{self.against}; neighbouring data: {self.neighbours}; sampling: {self.assumption}"
        )

    def facts(self, epsilon: float | None) -> dict[str, Any]:
        """Return the facts for summary.json and the report."""
        return {
            "epsilon": epsilon,
            "delta": self.delta,
            "unit": self.unit,
            "neighbours": self.neighbours,
            "sampling": self.assumption,
            "against": self.against,
            "said": self.said(epsilon),
        }
